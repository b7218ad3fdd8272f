/* What a page is given, decoded: numbers of any example, loop, position and head. No drawing. */

const SHARE = 65535;
const NOT_SAID = -32768;
const TYPES = {
  u8: Uint8Array, u16: Uint16Array, i8: Int8Array, i16: Int16Array, i32: Int32Array, f32: Float32Array,
};

/* What was sent, with its bytes as they were before they were packed (base64 of gzip). */
export async function inflate(payload) {
  const text = atob(payload.bytes);
  const packed = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) packed[k] = text.charCodeAt(k);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return { ...payload, bytes: await new Response(stream).arrayBuffer() };
}

/* The numbers of an array of bytes, and where [a, b, …] stands in them. */
export function unpack(bytes, { type, shape, start }) {
  const size = shape.reduce((a, b) => a * b, 1) * TYPES[type].BYTES_PER_ELEMENT;
  const values = new TYPES[type](bytes.slice(start, start + size));
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1));
  const place = (...index) => index.reduce((at, k, axis) => at + k * strides[axis], 0);
  return { values, shape, place, at: (...index) => values[place(...index)] };
}

/* Control characters and marks of direction as pictures or code points: text that stays in its place. */
export function plain(text) {
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (c) => {
    const code = c.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `⟨${code.toString(16).padStart(4, "0")}⟩`;
  });
}

/* What has been inflated, by example, loop, position and head. */
export function decode(payload) {
  const arrays = new Map();
  const get = (name) => {
    if (!arrays.has(name)) arrays.set(name, name in payload.arrays ? unpack(payload.bytes, payload.arrays[name]) : null);
    return arrays.get(name);
  };
  /* Of an example in which nothing is asked, such as a prompt, all answers are shown: none is right or wrong. */
  const free = (example, n) => Array.from({ length: n }, (_, pos) => get("target").at(example, pos)).every((target) => target < 0);
  const examples = payload.examples.map((one, k) => ({ ...one, tokens: one.tokens.map(plain), said: plain(one.said), free: free(k, one.tokens.length) }));
  const most = Math.log2(Math.max(payload.classes, 2));
  const symbol = (k) => (k < 0 ? "" : plain(payload.symbols[k] ?? k));
  const [, , , ranks] = payload.arrays.answer.shape;

  /* What the readout says of a position. `right` is null where nothing is asked, `open` true where a program leaves the
     answer open; what there is none of in a program, such as a probability, is null. */
  function cell(example, loop, pos) {
    const answers = [];
    for (let rank = 0; rank < ranks; rank++) {
      const index = get("answer").at(example, loop, pos, rank);
      const share = get("probability")?.at(example, loop, pos, rank);
      answers.push({ index, symbol: symbol(index), probability: share === undefined ? null : share / SHARE });
    }
    const target = get("target").at(example, pos);
    const entropy = get("entropy")?.at(example, loop, pos) ?? null;
    const open = answers[0].index < 0;
    return {
      answers,
      open,
      target: target < 0 ? null : symbol(target),
      right: target < 0 || open ? null : target === answers[0].index,
      entropy,
      sureness: Math.min(1, Math.max(0, 1 - (entropy ?? 0) / most)),
      moved: get("moved")?.at(example, loop, pos) ?? null,
      plane: get("plane") && [0, 1].map((axis) => get("plane").at(example, loop, pos, axis)),
    };
  }

  const shape = payload.arrays.attention?.shape;
  const heads = [];
  if (shape)
    for (let layer = 0; layer < shape[2]; layer++)
      for (let head = 0; head < shape[3]; head++)
        heads.push({ layer, head, name: shape[2] > 1 ? `head ${layer}.${head}` : `head ${head}` });

  /* What would be read if the loop ended after each of its layers but the last. */
  const inners = payload.arrays.inner_answer?.shape[2] ?? 0;
  function inner(example, loop, pos, layer) {
    const index = get("inner_answer").at(example, loop, layer, pos), target = get("target").at(example, pos);
    if (index < 0) return null;
    return { symbol: symbol(index), probability: get("inner_probability").at(example, loop, layer, pos) / SHARE, right: target < 0 ? null : target === index };
  }

  /* Where a head looks from a position: the positions with most attention first. */
  function looks(example, loop, pos, head) {
    if (!heads.length || loop === 0) return [];
    const { layer, head: index } = heads[head];
    const found = [];
    for (let nth = 0; nth < shape[5]; nth++) {
      const weight = get("attention").at(example, loop, layer, index, pos, nth) / SHARE;
      if (weight > 0) found.push({ pos: get("key").at(example, loop, layer, index, pos, nth), weight });
    }
    return found;
  }

  /* A program's variable, and the value that the model's answer implies; null where none is. */
  function variable(name, example, loop, pos) {
    const [value, implied] = ["variable", "implied"].map((array) => {
      const found = get(array).at(name, example, loop, pos);
      return found === NOT_SAID ? null : found;
    });
    return { value, implied, agrees: value === null || implied === null ? null : value === implied };
  }

  /* Corners of the plane that all states of an example lie in. */
  function bounds(example) {
    const { tokens, loops } = examples[example];
    const ends = [[Infinity, -Infinity], [Infinity, -Infinity]];
    for (let loop = 0; loop <= loops; loop++)
      for (let pos = 0; pos < tokens.length; pos++)
        for (const axis of [0, 1]) {
          const value = get("plane").at(example, loop, pos, axis);
          ends[axis] = [Math.min(ends[axis][0], value), Math.max(ends[axis][1], value)];
        }
    return ends;
  }

  /* What cells can show. */
  const shown = ["answer", ...("moved" in payload.arrays ? ["moved"] : []), ...(payload.names.length ? ["variable"] : [])];
  const has = (name) => name in payload.arrays;

  return {
    asks: payload.asks, missing: payload.missing, axes: payload.axes, names: payload.names, shown, has,
    examples, heads, inners, cell, inner, looks, variable, bounds,
  };
}

/* A number as it is read: four digits behind the point, or a power of ten. */
export function spell(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return Math.abs(value) >= 1e4 ? value.toExponential(3) : value.toFixed(4);
}

/* A place in words, for those who do not see it. */
export function describe(data, { example, loop, pos }) {
  const { answers, open, right, target } = data.cell(example, loop, pos);
  const verdict = target === null ? "no answer is scored here" : open ? `${target} is right` : right ? "right" : `wrong, ${target} is right`;
  const [{ symbol, probability }] = answers;
  const said = open ? "leaves the answer open" : `answers ${symbol}${probability === null ? "" : ` with probability ${probability.toFixed(3)}`}`;
  return `loop ${loop}, position ${pos}, ${data.examples[example].tokens[pos]}: ${said}, ${verdict}`;
}
