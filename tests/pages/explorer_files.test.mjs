/* Drawings as SVG and numbers as CSV: run by node --test. */
import assert from "node:assert/strict";
import test from "node:test";
import { attentionTable, captionOf, cellTable, csv, gridImage, planeImage, svgContext } from "../../loopinterp/pages/explorer/explorer_files.js";
import { opened } from "./explorer_data.test.mjs";

const width = (_, text) => 6 * text.length;
const theme = { mono: "monospace", font: "serif", ...Object.fromEntries(["text", "muted", "surface", "accent", "good", "bad", "moved", "focus"].map((name, k) => [name, `rgb(${k}, 0, 0)`])) };
const state = { example: 0, loop: 1, pos: 1, head: -1, layer: -1, shown: "answer", variable: 0 };

test("what is drawn is written down, in the order in which it is drawn", () => {
  const context = svgContext(width);
  Object.assign(context, { fillStyle: "red", globalAlpha: 0.5, textAlign: "center", font: "10px serif" });
  context.fillRect(1, 2, 3, 4.005);
  context.fillText('<a & "b">', 5, 6);
  Object.assign(context, { strokeStyle: "blue", lineWidth: 2, globalAlpha: 1 });
  context.beginPath();
  context.moveTo(0, 0);
  context.bezierCurveTo(1, 2, 3, 4, 5, 6);
  context.stroke();
  assert.deepEqual(context.parts, [
    '<rect x="1" y="2" width="3" height="4.01" fill="red" opacity="0.5"></rect>',
    '<text x="5" y="6" fill="red" text-anchor="middle" dominant-baseline="central" style="font: 10px serif" opacity="0.5">&lt;a &amp; &quot;b&quot;&gt;</text>',
    '<path d="M0 0C1 2 3 4 5 6" fill="none" stroke="blue" stroke-width="2"></path>',
  ]);
});

test("the drawing of an example has all of its cells, words and arcs, and the whole width", async () => {
  const data = await opened();
  data.examples[0].detail = "a & b";
  const image = gridImage(data, state, theme, width);
  assert.match(image, /^<svg xmlns="[^"]*" viewBox="0 0 (\d+) (\d+)" width="\1" height="\2" role="img"><title>Example 1\. a &amp; b s\.<\/title>/);
  assert.equal(image.split(`fill="${theme.accent}"`).length - 1 >= 1, true); // the right answer
  for (const word of ["a", "b", "yes", "loop 1", "input", "right"]) assert.ok(image.includes(`>${word}<`), word);
  assert.ok(image.includes("a4.1 4.1 "), "the circle of a head that looks at its own place");
  assert.doesNotMatch(image, /NaN|undefined|null/);
  assert.doesNotMatch(planeImage(data, state, theme, width), /NaN|undefined|null/);
});

test("the caption says which example it is, what the colours mean, and what is framed", async () => {
  const data = await opened();
  assert.equal(captionOf(data, state), "Example 1. d s. Across: positions; down: loops. Cells: blue where right, red where wrong. " +
    "Framed: loop 1, position 1, b: answers yes with probability 0.900, right.");
  data.examples[0].detail = data.examples[0].said = "";
  assert.match(captionOf(data, { ...state, shown: "variable" }), /^Example 1\. r\. .* Cells: p\.v, green where/);
});

test("the table has a row for each loop and position, and every number of it", async () => {
  const data = await opened();
  const [names, ...rows] = cellTable(data, 0);
  assert.equal(rows.length, 4);
  const row = Object.fromEntries(names.map((name, k) => [name, rows[3][k]]));
  assert.deepEqual(row, {
    loop: 1, position: 1, token: "b", "right answer": "yes", answer: "yes", probability: 0.900008, "entropy in bits": 0.469,
    moved: 0.00002, one: 4, two: 5, "p.v": 1, "p.v by the model's answer": 0,
  });
  assert.equal(rows.every((each) => each.length === names.length), true);
  assert.deepEqual(attentionTable(data, 0), [["loop", "head", "position", "looks at", "weight"], [1, "head 0", 0, 0, 1], [1, "head 0", 1, 1, 0.700008], [1, "head 0", 1, 0, 0.299992]]);
});

test("a program's table leaves empty what a program has not", async () => {
  const data = { ...(await opened({ probability: null, entropy: null, moved: null, plane: null })), axes: [] };
  const [names, ...rows] = cellTable(data, 0);
  assert.equal(rows.every((each) => each.length === names.length), true);
  assert.deepEqual(rows[0].slice(5, 8), ["", "", ""]);
});

test("texts are quoted, and no spreadsheet runs them", () => {
  assert.equal(csv([["a", 'b,"c"'], ["=1+1", -2]]), 'a,"b,""c"""\n\'=1+1,-2\n');
});
