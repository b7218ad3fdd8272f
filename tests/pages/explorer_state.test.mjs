/* The one selection, and what keys do to it: run by node --test. */
import assert from "node:assert/strict";
import test from "node:test";
import { together } from "../../loopinterp/pages/explorer/explorer.js";
import { fitted, followed, initial, keyed, previewed, reduce } from "../../loopinterp/pages/explorer/explorer_state.js";

const data = {
  examples: [{ loops: 3, tokens: ["a", "b", "c"] }, { loops: 1, tokens: ["d"] }],
  heads: [{}, {}],
  names: ["p.v"],
  shown: ["answer", "moved", "variable"],
  cell: (example, loop, pos) => ({ right: pos < 1 ? null : true }),
};
const start = initial(data);
const press = (state, key) => reduce(state, keyed({ key }), data);

test("it opens after the first loop, where something is asked", () => {
  assert.deepEqual([start.example, start.loop, start.pos, start.head, start.shown], [0, 1, 1, -1, "answer"]);
});

test("arrows go from loop to loop and from position to position, and stop at the ends", () => {
  let state = start;
  for (const [key, loop, pos] of [["ArrowDown", 2, 1], ["ArrowDown", 3, 1], ["ArrowDown", 3, 1], ["ArrowRight", 3, 2], ["ArrowRight", 3, 2], ["ArrowLeft", 3, 1], ["Home", 0, 1], ["ArrowUp", 0, 1], ["End", 3, 1]]) {
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
  assert.equal(press(state, "ArrowDown").playing, false);
});

test("keys with others held, and other keys, are left to the browser", () => {
  assert.equal(keyed({ key: "ArrowUp", ctrlKey: true }), null);
  assert.equal(keyed({ key: "Tab" }), null);
});

test("what is not there cannot be chosen", () => {
  assert.equal(fitted({ ...start, head: 7 }, data).head, -1);
  const without = { ...data, names: [], shown: ["answer"] };
  assert.deepEqual(["variable", "moved"].map((shown) => fitted({ ...start, shown }, without).shown), ["answer", "answer"]);
});

test("a pointer shows another place and chooses none, and nothing while it plays", () => {
  const at = (loop, pos, state = start) => previewed(state, { loop, pos }, data);
  assert.deepEqual(at(3, 2), { ...start, loop: 3, pos: 2 });
  assert.deepEqual(at(null, 0), { ...start, pos: 0 }); // above the rows: at the chosen loop
  for (const [loop, pos] of [[4, 0], [1, 3], [1, -1], [start.loop, start.pos], [null, start.pos]]) assert.equal(at(loop, pos), null);
  assert.equal(at(3, 2, { ...start, playing: true }), null);
});

/* Another page: it has one input in common with the first, more loops, one more variable, and the common one elsewhere. */
const other = {
  examples: [{ loops: 2, tokens: ["e", "f"] }, { loops: 5, tokens: ["a", "b", "c"] }],
  heads: [{}],
  names: ["q.w", "p.v"],
  shown: ["answer", "variable"],
  cell: data.cell,
};

test("another page follows in what has changed, as far as it has it", () => {
  const own = { ...initial(other), example: 1, loop: 5, head: 0 };
  const follow = (set, from = start) => followed(own, other, from, { ...from, ...set }, { set }, data);
  assert.deepEqual(follow({ loop: 3 }), { ...own, loop: 3 });
  assert.deepEqual(follow({ pos: 9 }), { ...own, pos: 2 });
  assert.deepEqual(follow({ head: 1 }), own);
  assert.deepEqual(follow({ shown: "variable" }), { ...own, shown: "variable", variable: 1 });
  assert.deepEqual(followed({ ...own, example: 0 }, other, start, start, {}, data).example, 0);
});

test("the same input is chosen where there is one, else the own one stays", () => {
  const at = (example) => ({ ...initial(other), example });
  const choose = (own, before, after) =>
    followed(at(own), other, { ...start, example: before }, { ...start, example: after }, {}, data).example;
  assert.deepEqual([choose(0, 1, 0), choose(1, 1, 0), choose(0, 0, 1), choose(1, 0, 1)], [1, 1, 0, 1]);
  const twice = { ...other, examples: [...other.examples, other.examples[1]] };
  assert.equal(followed(at(2), twice, { ...start, example: 1 }, start, {}, data).example, 2);
});

/* A page without drawing: what together() takes of it. */
function page(of) {
  const listeners = new Set();
  const one = { data: of, state: initial(of), drawn: 0 };
  one.dispatch = (action) => {
    const before = one.state;
    one.state = reduce(before, action, of);
    one.drawn += 1;
    for (const heard of listeners) heard(one.state, before, action);
  };
  one.follow = (set) => one.dispatch({ set });
  one.subscribe = (heard) => { listeners.add(heard); return () => listeners.delete(heard); };
  return one;
}
const loops = (pages) => pages.map(({ state }) => state.loop);

test("any of three leads, each follows once, and the clamped pull nobody back", () => {
  const pages = [page(data), page(other), page(data)];
  const [first, second, third] = pages;
  const end = together(pages);
  assert.equal(second.state.example, 1); // the first's input, from the start
  const drawn = pages.map((one) => one.drawn);
  second.dispatch({ set: { loop: 5 } });
  assert.deepEqual(loops(pages), [3, 5, 3]);
  assert.deepEqual(pages.map((one, k) => one.drawn - drawn[k]), [1, 1, 1]);
  third.dispatch({ by: { loop: 1 } }); // at its end: nothing has changed
  assert.deepEqual(loops(pages), [3, 5, 3]);
  first.dispatch({ set: { example: 1 } }); // which the second has not; of one loop
  assert.deepEqual(pages.map(({ state }) => [state.example, state.loop]), [[1, 1], [1, 1], [1, 1]]);
  end();
  first.dispatch({ set: { loop: 0 } });
  assert.deepEqual(loops(pages), [0, 1, 1]);
});

test("all play, each to its own end, and any of them pauses all", () => {
  const pages = [page(data), page(other)];
  const [first, second] = pages;
  together(pages);
  first.dispatch("play");
  const playing = () => pages.map(({ state }) => state.playing);
  assert.deepEqual(playing(), [true, true]);
  first.dispatch("tick");
  first.dispatch("tick");
  assert.deepEqual([loops(pages), playing()], [[3, 3], [false, true]]);
  second.dispatch("tick");
  assert.deepEqual([loops(pages), playing()], [[3, 4], [false, true]]);
  second.dispatch("play");
  assert.deepEqual(playing(), [false, false]);
  second.dispatch("play");
  second.dispatch("play");
  assert.deepEqual(playing(), [false, false]);
});
