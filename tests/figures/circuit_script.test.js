"use strict";
const test = require("node:test");
const assert = require("node:assert/strict");
const { pieces, neighbours, next } = require("../../loopinterp/figures/circuit_assets/circuit.js");

test("code is cut at names, the longest first, whole words only", () => {
  assert.deepEqual(pieces("carry = carry_in + carry", new Set(["carry"])), [
    ["carry", "carry"], [" = carry_in + ", ""], ["carry", "carry"],
  ]);
  assert.deepEqual(pieces("a & (b | c)", new Set(["b", "b | c"])), [["a & (", ""], ["b | c", "b | c"], [")", ""]]);
  assert.equal(pieces("x.carry f(y)", new Set(["carry", "f(y)"])).map(([text]) => text).join(""), "x.carry f(y)");
});

test("pieces put together are the code, whatever the names are", () => {
  const code = "where(a < 3, b + 1, …)  # $&\n<script>";
  for (const names of [[], ["…"], [""], ["a < 3", "+ 1", "<script>"], [".*", "b"]])
    assert.equal(pieces(code, new Set(names)).map(([text]) => text).join(""), code);
});

test("neighbours have their loop, role and effect", () => {
  const graph = {
    nodes: [{ id: "a", label: "carry" }, { id: "b", label: "shift_1" }],
    edges: [
      { source: "a", target: "b", lag: 0, role: "value", effect: 0.25 },
      { source: "b", target: "a", lag: 1, role: "", effect: null },
    ],
  };
  assert.deepEqual(neighbours(graph, "b"), { reads: ["carry as value (effect 0.250)"], readBy: ["carry, next loop"] });
});

test("arrow keys go to the nearest place that way, and stay at the end", () => {
  const places = [{ x: 0, y: 0 }, { x: 100, y: 0 }, { x: 0, y: 50 }, { x: 300, y: 10 }];
  assert.equal(next(places, 0, "ArrowRight"), 1);
  assert.equal(next(places, 0, "ArrowDown"), 2);
  assert.equal(next(places, 1, "ArrowRight"), 3);
  assert.equal(next(places, 0, "ArrowUp"), 0);
});
