/* Sizes of the grid, and how a cell looks: run by node --test. */
import assert from "node:assert/strict";
import test from "node:test";
import { look, measure, placeAt } from "../../loopinterp/pages/explorer/explorer_drawing.js";

const data = (n, loops, word = "a") => ({
  examples: [{ loops, tokens: Array(n).fill(word) }],
  heads: [{}],
  inner: () => ({ symbol: "i", probability: 0.5, right: true }),
  cell: () => ({ target: "y", right: false, sureness: 1, moved: 1e-2, answers: [{ symbol: "x" }] }),
  variable: (name) => [{ value: 1, implied: 1, agrees: true }, { value: -1, implied: 0, agrees: false }, { value: null, implied: null, agrees: null }][name],
});
const widths = (word) => 0.6 * word.length;

test("cells are as wide as there is room, and no wider than a thumb", () => {
  assert.equal(measure(data(10, 4), 0, 352, widths).cell, 30);
  assert.ok(measure(data(3, 4), 0, 900, widths).cell <= 46);
  const crowded = measure(data(49, 49, "0+1"), 0, 300, widths);
  assert.ok(crowded.cell >= 9 * 1.8 && crowded.row >= 7);
  assert.ok(measure(data(2000, 4), 0, 300, widths).width <= 15000);
});

test("a point is the cell that is drawn there", () => {
  const sizes = measure(data(10, 4), 0, 352, widths);
  assert.deepEqual(placeAt(sizes, 95, sizes.top + 2 * sizes.row + 1), { pos: 3, loop: 2 });
  assert.deepEqual(placeAt(sizes, 5, 3), { pos: 0, loop: null });
});

test("colours mean one thing: wrong answers and broken agreement are marked", () => {
  const state = { example: 0, shown: "answer", variable: 0, layer: -1 };
  assert.deepEqual(look(data(1, 1), state, 1, 0), { word: "x", colour: "bad", strength: 0.53, marked: true });
  const shown = [0, 1, 2].map((variable) => look(data(1, 1), { ...state, shown: "variable", variable }, 1, 0));
  assert.deepEqual(shown.map((one) => [one.word, one.colour, one.marked]), [["1", "good", false], ["?", "bad", true], ["", "muted", false]]);
  assert.equal(look(data(1, 1), { ...state, shown: "moved" }, 1, 0).colour, "moved");
  const within = look(data(1, 1), { ...state, layer: 0 }, 1, 0);
  assert.deepEqual([within.word, within.colour, within.marked], ["i", "accent", false]);
});

test("where nothing is asked of an example its answers are shown, as neither right nor wrong", () => {
  const state = { example: 0, shown: "answer", variable: 0, layer: -1 };
  const one = { ...data(1, 1), cell: () => ({ target: null, right: null, sureness: 1, moved: 0, answers: [{ symbol: "x" }] }) };
  assert.equal(look(one, state, 1, 0).word, ""); // such as BOS, beside positions that are asked
  one.examples[0].free = true;
  assert.deepEqual(look(one, state, 1, 0), { word: "x", colour: "muted", strength: 0.53, marked: false });
});

test("an answer that a program leaves open is a question, neither right nor wrong", () => {
  const state = { example: 0, shown: "answer", variable: 0, layer: -1 };
  const one = { ...data(1, 1), cell: () => ({ target: "y", right: null, open: true, sureness: 1, answers: [{ symbol: "" }] }) };
  assert.deepEqual(look(one, state, 1, 0), { word: "?", colour: "muted", strength: 0.08, marked: false });
});

test("on a phone rows and arcs are lower, so that the grid is on the first screen", () => {
  const [phone, desk] = [332, 900].map((width) => measure(data(9, 9), 0, width, widths));
  assert.ok(phone.height <= 310 && phone.row >= 16 && desk.row === 22);
});
