/* The one selection that all panels share, and what keys do to it. No drawing. */

const clamp = (value, most) => Math.min(Math.max(value, 0), most);

/* A selection within what there is: example, loop, position, head (-1: all), layer (-1: the loop), what is shown. */
export function fitted(state, data) {
  const example = clamp(state.example, data.examples.length - 1);
  const { loops, tokens } = data.examples[example];
  return {
    ...state,
    example,
    loop: clamp(state.loop, loops),
    pos: clamp(state.pos, tokens.length - 1),
    head: state.head < data.heads.length ? Math.max(state.head, -1) : -1,
    variable: clamp(state.variable, Math.max(data.names.length - 1, 0)),
    layer: state.layer < (data.inners ?? 0) ? Math.max(state.layer, -1) : -1,
    shown: data.shown.includes(state.shown) ? state.shown : "answer",
  };
}

/* The selection as it would be where a pointer is (a loop of null: above the rows); null while it plays, where there is
   no cell, and where it is already. */
export function previewed(state, { loop, pos }, data) {
  const { loops, tokens } = data.examples[state.example];
  if (state.playing || pos < 0 || pos >= tokens.length || loop > loops) return null;
  const there = { ...state, pos, loop: loop ?? state.loop };
  return there.pos === state.pos && there.loop === state.loop ? null : there;
}

/* The selection that a page opens with: the first example after its first loop, where it is asked. */
export function initial(data, given = {}) {
  const [first] = data.examples;
  const asked = first.tokens.findIndex((_, pos) => data.cell(0, 0, pos).right !== null);
  const start = { example: 0, loop: Math.min(1, first.loops), pos: Math.max(asked, 0), head: -1, layer: -1, shown: "answer", variable: 0, playing: false };
  return fitted({ ...start, ...given }, data);
}

/* The selection after an action: {set: {...}}, {by: {loop: 1}}, or "play", "tick". */
export function reduce(state, action, data) {
  const { loops } = data.examples[state.example];
  if (action === "play") {
    const again = !state.playing && state.loop === loops;
    return { ...state, playing: !state.playing, loop: again ? 0 : state.loop };
  }
  if (action === "tick") {
    const loop = clamp(state.loop + 1, loops);
    return { ...state, loop, playing: loop < loops };
  }
  const by = Object.entries(action.by || {}).map(([name, step]) => [name, state[name] + step]);
  return fitted({ ...state, playing: false, ...Object.fromEntries(by), ...action.set }, data);
}

const alike = (first, second) => first.length === second.length && first.every((token, pos) => token === second[pos]);

/* Of a page with selection `own`, what it chooses when another goes from a selection (null: from none) to the next by an
   action: only what changed there. The same input where it has it, else its own; the variable of the same name. */
export function followed(own, data, before, after, action, other) {
  const changed = (...names) => names.some((name) => before?.[name] !== after[name]);
  const set = action === "tick" ? { playing: own.playing } : { playing: after.playing };
  if (changed("example")) {
    const { tokens } = other.examples[after.example];
    const same = (one) => alike(one.tokens, tokens);
    const found = same(data.examples[own.example]) ? own.example : data.examples.findIndex(same);
    if (found >= 0) set.example = found;
  }
  for (const name of ["loop", "pos"]) if (changed(name)) set[name] = after[name];
  if (changed("shown", "variable", "layer")) {
    const variable = data.names.indexOf(other.names[after.variable]);
    Object.assign(set, { shown: after.shown, layer: after.layer }, variable < 0 ? {} : { variable });
  }
  return fitted({ ...own, ...set }, data);
}

/* A selection as a page's fragment, and back: #example=2&loop=5&pos=3, counted as the page counts them. */
export const address = ({ example, loop, pos }) => `#example=${example + 1}&loop=${loop}&pos=${pos}`;

/* The selection that a fragment names, or null. */
export function placed(fragment) {
  const [, example, loop, pos] = /^#example=(\d+)&loop=(\d+)&pos=(\d+)$/.exec(fragment) ?? [];
  return pos === undefined ? null : { example: Math.max(Number(example) - 1, 0), loop: Number(loop), pos: Number(pos) };
}

const KEYS = {
  ArrowUp: { by: { loop: -1 } },
  ArrowDown: { by: { loop: 1 } },
  ArrowLeft: { by: { pos: -1 } },
  ArrowRight: { by: { pos: 1 } },
  Home: { set: { loop: 0 } },
  End: { set: { loop: Infinity } },
  PageUp: { by: { example: -1 } },
  PageDown: { by: { example: 1 } },
  " ": "play",
};

/* What a key does, or null. */
export function keyed({ key, ctrlKey, metaKey, altKey }) {
  return ctrlKey || metaKey || altKey ? null : KEYS[key] ?? null;
}
