/* Decoding and words, on data that is written by hand: run by node --test. */
import assert from "node:assert/strict";
import { gzipSync } from "node:zlib";
import test from "node:test";
import { decode, describe, inflate, plain, spell, unpack } from "../../loopinterp/pages/explorer/explorer_data.js";

const TYPES = { u8: Uint8Array, u16: Uint16Array, i16: Int16Array, f32: Float32Array };

/* One example of two positions and one loop, one head, one variable. */
export function payload(changes = {}) {
  const given = {
    target: ["i16", [1, 2], [-1, 1]],
    answer: ["u8", [1, 2, 2, 2], [0, 1, 0, 1, 1, 0, 1, 0]],
    probability: ["u16", [1, 2, 2, 2], [0.5, 0.5, 0.75, 0.25, 1, 0, 0.9, 0.1].map((p) => Math.round(p * 65535))],
    entropy: ["f32", [1, 2, 2], [1, 0.8113, 0, 0.469]],
    moved: ["f32", [1, 2, 2], [NaN, NaN, 0.5, 0.00002]],
    plane: ["f32", [1, 2, 2, 2], [0, 0, 1, 1, 2, -3, 4, 5]],
    key: ["u8", [1, 2, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1, 0]],
    attention: ["u16", [1, 2, 1, 1, 2, 2], [0, 0, 0, 0, 65535, 0, 45875, 19660]],
    variable: ["i16", [1, 1, 2, 2], [-1, 0, 1, 1]],
    implied: ["i16", [1, 1, 2, 2], [-32768, 0, 1, 0]],
    ...changes,
  };
  const arrays = {}, parts = [];
  let start = 0;
  for (const [name, found] of Object.entries(given)) {
    if (!found) continue;
    const [type, shape, values] = found, bytes = Buffer.from(TYPES[type].from(values).buffer);
    arrays[name] = { type, shape, start };
    start += bytes.length;
    parts.push(bytes);
  }
  return {
    asks: "", classes: 2, symbols: { 0: "no", 1: "yes" }, axes: ["one", "two"], missing: {}, names: ["p.v"],
    examples: [{ reason: "r", detail: "d", said: "s", tokens: ["a", "b"], loops: 1, askedAfter: 1 }],
    arrays, bytes: gzipSync(Buffer.concat(parts)).toString("base64"),
  };
}

export const opened = async (changes) => decode(await inflate(payload(changes)));

test("numbers are found where they stand, of any type, after any other", async () => {
  const { bytes, arrays } = await inflate(payload());
  assert.equal(unpack(bytes, arrays.plane).at(0, 1, 0, 1), -3);
  assert.equal(unpack(bytes, arrays.variable).at(0, 0, 0, 0), -1);
  assert.deepEqual([...unpack(bytes, arrays.target).values], [-1, 1]);
});

test("an example of which nothing is asked is told from one in which a place is not", async () => {
  assert.equal((await opened()).examples[0].free, false);
  assert.equal((await opened({ target: ["i16", [1, 2], [-1, -1]] })).examples[0].free, true);
});

test("a cell says what is answered, how surely, and whether that is right", async () => {
  const data = await opened();
  const first = data.cell(0, 0, 1);
  assert.deepEqual(first.answers.map((one) => one.symbol), ["no", "yes"]);
  assert.equal(first.right, false);
  assert.equal(first.target, "yes");
  assert.ok(Number.isNaN(first.moved));
  assert.ok(Math.abs(first.answers[0].probability - 0.75) < 1e-4);
  assert.ok(Math.abs(first.sureness - 0.1887) < 1e-4);
  const last = data.cell(0, 1, 1);
  assert.equal(last.right, true);
  assert.deepEqual(last.plane, [4, 5]);
  assert.equal(data.cell(0, 1, 0).right, null);
});

test("heads look at loops that were made, at positions with some weight", async () => {
  const data = await opened();
  assert.deepEqual(data.heads, [{ layer: 0, head: 0, name: "head 0" }]);
  assert.deepEqual(data.looks(0, 0, 1, 0), []);
  assert.deepEqual(data.looks(0, 1, 0, 0), [{ pos: 0, weight: 1 }]);
  assert.deepEqual(data.looks(0, 1, 1, 0).map((one) => [one.pos, one.weight.toFixed(2)]), [[1, "0.70"], [0, "0.30"]]);
});

test("within a loop there is an answer after each layer but the last, and none before the first loop", async () => {
  assert.equal((await opened()).inners, 0);
  const data = await opened({ inner_answer: ["i16", [1, 2, 1, 2], [-1, -1, 0, 1]], inner_probability: ["u16", [1, 2, 1, 2], [0, 0, 65535, 32768]] });
  assert.equal(data.inners, 1);
  assert.equal(data.inner(0, 0, 1, 0), null);
  assert.deepEqual(data.inner(0, 1, 0, 0), { symbol: "no", probability: 1, right: null });
  assert.equal(data.inner(0, 1, 1, 0).right, true);
});

test("a program's run has answers without probabilities, and may leave one open", async () => {
  const data = await opened({ answer: ["i16", [1, 2, 2, 1], [0, 1, 0, -1]], probability: null, entropy: null, moved: null, plane: null });
  assert.deepEqual(data.shown, ["answer", "variable"]);
  const { answers: [best], right, open, moved, plane, sureness } = data.cell(0, 0, 1);
  assert.deepEqual([best.symbol, best.probability, right, open, moved, plane, sureness], ["yes", null, true, false, null, null, 1]);
  const left = data.cell(0, 1, 1);
  assert.deepEqual([left.open, left.right, left.target], [true, null, "yes"]);
  assert.equal(describe(data, { example: 0, loop: 0, pos: 1 }), "loop 0, position 1, b: answers yes, right");
  assert.equal(describe(data, { example: 0, loop: 1, pos: 1 }), "loop 1, position 1, b: leaves the answer open, yes is right");
});

test("a variable agrees, differs, or is left open", async () => {
  const data = await opened();
  assert.deepEqual(data.variable(0, 0, 0, 0), { value: -1, implied: null, agrees: null });
  assert.equal(data.variable(0, 0, 1, 0).agrees, true);
  assert.equal(data.variable(0, 0, 1, 1).agrees, false);
});

test("what a model cannot give is left out", async () => {
  const data = await opened({ attention: null, key: null, variable: null, implied: null });
  assert.deepEqual(data.heads, []);
  assert.deepEqual(data.looks(0, 1, 0, 0), []);
});

test("the plane's ends are those of the example", async () => {
  assert.deepEqual((await opened()).bounds(0), [[0, 4], [-3, 5]]);
});

test("a place is said in words", async () => {
  const data = await opened();
  assert.equal(describe(data, { example: 0, loop: 0, pos: 1 }), "loop 0, position 1, b: answers no with probability 0.750, wrong, yes is right");
  assert.match(describe(data, { example: 0, loop: 1, pos: 0 }), /no answer is scored here$/);
});

test("controls and marks of direction are spelled out, and all else is left alone", () => {
  assert.equal(plain("a</script>é漢"), "a</script>é漢");
  assert.equal(plain("\u0000\n\u202eabc\u200f\u0085"), "␀␊⟨202e⟩abc⟨200f⟩⟨0085⟩");
});

test("numbers are short, small and large ones too", () => {
  assert.deepEqual([0, 0.12345, 2e-5, 123456, NaN, null].map(spell), ["0.0000", "0.1235", "2.0e-5", "1.235e+5", "–", "–"]);
});
