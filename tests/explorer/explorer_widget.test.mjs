/* What a notebook adds, of it what needs no page: two explorers in step. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { initial, reduce } from "../../loopinterp/explorer/assets/explorer_state.js";

/* The file imports nothing, as it is joined to the component: its functions are taken from its text. */
const text = readFileSync(new URL("../../loopinterp/explorer/assets/explorer_widget.js", import.meta.url), "utf8");
const together = new Function(`${text.replace(/^export default .*$/m, "")}; return together;`)();

const explorer = (names) => {
  const data = {
    examples: [{ tokens: ["a", "b", "c"], loops: 5 }], heads: [], names,
    cell: () => ({ right: true }),
  };
  const heard = new Set();
  const handle = {
    state: initial(data),
    dispatch(action) {
      handle.state = reduce(handle.state, action, data);
      for (const each of heard) each(handle.state);
    },
    select: (set) => handle.dispatch({ set }),
    subscribe: (each) => heard.add(each),
  };
  return handle;
};

test("a step in one is a step in the other, and one that plays goes on", () => {
  const [left, right] = [explorer(["carry"]), explorer(["carry"])];
  together(left, right);
  left.select({ loop: 3, pos: 2, shown: "variable" });
  assert.deepEqual([right.state.loop, right.state.pos, right.state.shown], [3, 2, "variable"]);
  right.dispatch({ by: { loop: -1 } });
  assert.equal(left.state.loop, 2);
  left.dispatch("play");
  left.dispatch("tick");
  assert.deepEqual([left.state.playing, left.state.loop, right.state.loop], [true, 3, 3]);
});

test("what the other has nothing of can be shown in one alone", () => {
  const [left, right] = [explorer(["carry"]), explorer([])]; // no program says anything of zeros put in
  together(left, right);
  left.select({ shown: "variable" });
  assert.deepEqual([left.state.shown, right.state.shown], ["variable", "answer"]);
  left.dispatch("play");
  left.dispatch("tick");
  assert.deepEqual([left.state.playing, left.state.loop, right.state.loop], [true, 2, 2]);
  right.dispatch({ by: { pos: 1 } });
  assert.deepEqual([left.state.shown, left.state.pos], ["variable", 1]);
});
