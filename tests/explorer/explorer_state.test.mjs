/* The one selection, and what keys do to it: run by node --test. */
import assert from "node:assert/strict";
import test from "node:test";
import { fitted, initial, keyed, reduce } from "../../loopinterp/explorer/assets/explorer_state.js";

const data = {
  examples: [{ loops: 3, tokens: ["a", "b", "c"] }, { loops: 1, tokens: ["d"] }],
  heads: [{}, {}],
  names: ["p.v"],
  cell: (example, loop, pos) => ({ right: pos < 1 ? null : true }),
};
const start = initial(data);
const press = (state, key) => reduce(state, keyed({ key }), data);

test("it opens after the first loop, where something is asked", () => {
  assert.deepEqual([start.example, start.loop, start.pos, start.head, start.shown], [0, 1, 1, -1, "answer"]);
});

test("arrows go from loop to loop and from position to position, and stop at the ends", () => {
  let state = start;
  for (const [key, loop, pos] of [["ArrowRight", 2, 1], ["ArrowRight", 3, 1], ["ArrowRight", 3, 1], ["ArrowDown", 3, 2], ["ArrowDown", 3, 2], ["ArrowUp", 3, 1], ["Home", 0, 1], ["ArrowLeft", 0, 1], ["End", 3, 1]]) {
    state = press(state, key);
    assert.deepEqual([state.loop, state.pos], [loop, pos], key);
  }
});

test("another example keeps what it has room for", () => {
  const state = press(reduce(start, { set: { loop: 3, pos: 2 } }, data), "PageDown");
  assert.deepEqual([state.example, state.loop, state.pos], [1, 1, 0]);
  assert.equal(press(state, "PageDown").example, 1);
});

test("play goes to the last loop, stops there, and begins anew", () => {
  let state = press(start, " ");
  assert.equal(state.playing, true);
  for (let k = 0; k < 5; k++) state = reduce(state, "tick", data);
  assert.deepEqual([state.loop, state.playing], [3, false]);
  state = reduce(state, "play", data);
  assert.deepEqual([state.loop, state.playing], [0, true]);
  assert.equal(press(state, "ArrowRight").playing, false);
});

test("keys with others held, and other keys, are left to the browser", () => {
  assert.equal(keyed({ key: "ArrowLeft", ctrlKey: true }), null);
  assert.equal(keyed({ key: "Tab" }), null);
});

test("what is not there cannot be chosen", () => {
  assert.equal(fitted({ ...start, head: 7 }, data).head, -1);
  const without = { ...data, names: [] };
  assert.equal(fitted({ ...start, shown: "variable" }, without).shown, "answer");
});
