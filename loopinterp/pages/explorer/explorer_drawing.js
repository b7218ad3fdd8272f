/* Draws the grid of loops by positions, the arcs above it, and a state's way through the plane. */

export const HEAD_COLOURS = ["#3d68ea", "#c93a2e", "#2ca878", "#bf9000", "#b1389b", "#868c96"];

/* Sizes of the grid, for a width in pixels and the words that stand in it (their width at 1px). */
export function measure(data, example, width, wordWidth) {
  const { tokens, loops } = data.examples[example];
  const labels = 52;
  const widest = Math.max(1, ...tokens.map(wordWidth));
  const room = (width - labels) / tokens.length;
  const font = room > 10.5 * widest + 2 ? 10.5 : 9;
  const most = Math.max(3, Math.floor(15000 / (2 * tokens.length)));
  const cell = Math.min(Math.max(Math.min(font * widest + 1, 76), 14, Math.min(room, 46)), most);
  const narrow = width < 480; // a phone, whose first screen has the grid below the facts
  const row = Math.min(Math.max(Math.floor(460 / (loops + 1)), 7), narrow ? 18 : 22);
  const arcs = data.heads.length ? (narrow ? 40 : 58) : 0;
  const head = { arcs, tokens: arcs + 20, target: arcs + 42, now: arcs + 74 };
  return { labels, cell, row, font, head, top: head.now + 8, width: cell * tokens.length, height: head.now + 8 + row * (loops + 1) + 2 };
}

/* The loop and position at a point of the grid's canvas; the loop is null above the rows. */
export function placeAt(sizes, x, y) {
  const loop = y < sizes.top ? null : Math.floor((y - sizes.top) / sizes.row);
  return { pos: Math.floor(x / sizes.cell), loop };
}

/* How a cell looks: its word, its colour, how strong that is, and whether it is marked. */
export function look(data, state, loop, pos) {
  const { example, shown, variable } = state;
  if (shown === "variable") {
    const { value, agrees } = data.variable(variable, example, loop, pos);
    const word = value === null ? "" : value === -1 ? "?" : String(value);
    return { word, colour: agrees === null ? "muted" : agrees ? "good" : "bad", strength: agrees === null ? 0.06 : agrees ? 0.3 : 0.5, marked: agrees === false };
  }
  const cell = data.cell(example, loop, pos);
  if (shown === "moved") {
    const strength = cell.moved > 0 ? Math.min(1, Math.max(0, (Math.log10(cell.moved) + 4) / 4)) : 0;
    return { word: "", colour: "moved", strength: 0.85 * strength, marked: false };
  }
  const asked = cell.target !== null, said = asked || data.examples[example].free;
  if (state.layer >= 0) {
    const within = data.inner(example, loop, pos, state.layer);
    const { symbol, probability, right } = within ?? { symbol: "", probability: 0, right: null };
    const tone = !asked || !within ? "muted" : right ? "accent" : "bad";
    return { word: said ? symbol : "", colour: tone, strength: (said ? 0.5 : 0.08) * probability + 0.03, marked: right === false };
  }
  if (cell.open) return { word: said ? "?" : "", colour: "muted", strength: 0.08, marked: false };
  const colour = !asked ? "muted" : cell.right ? "accent" : "bad";
  return { word: said ? cell.answers[0].symbol : "", colour, strength: (said ? 0.5 : 0.08) * cell.sureness + 0.03, marked: cell.right === false };
}

/* A word cut to a width. */
function cut(context, word, width) {
  if (context.measureText(word).width <= width) return word;
  let kept = word;
  while (kept.length > 1 && context.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

function write(context, word, x, y, width) {
  context.fillText(cut(context, word, width), x, y);
}

/* The rows of all loops: drawn once for each example, and not at each step. */
export function drawRows(context, data, state, sizes, theme) {
  const { tokens, loops } = data.examples[state.example];
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${Math.min(12, sizes.row - 2)}px ${theme.mono}`;
  const gap = sizes.row > 9 ? 1 : 0.5;
  for (let loop = 0; loop <= loops; loop++)
    for (let pos = 0; pos < tokens.length; pos++) {
      const { word, colour, strength, marked } = look(data, state, loop, pos);
      const x = Math.round(pos * sizes.cell), y = sizes.top + loop * sizes.row;
      const [w, h] = [Math.round((pos + 1) * sizes.cell) - x - gap, sizes.row - gap];
      context.globalAlpha = strength;
      context.fillStyle = theme[colour];
      context.fillRect(x, y, w, h);
      context.globalAlpha = 1;
      if (marked) {
        const size = sizes.row < 12 || sizes.cell < 20 ? 4 : 6;
        context.fillStyle = theme.bad;
        context.beginPath();
        context.moveTo(x + w, y);
        context.lineTo(x + w, y + size);
        context.lineTo(x + w - size, y);
        context.fill();
      }
      if (word && sizes.row >= 12) {
        context.fillStyle = theme.text;
        write(context, word, x + w / 2, y + h / 2 + 0.5, w - 1);
      }
    }
}

/* What stands above the rows, of the place that is `seen`, and the selection: drawn at each step. */
export function drawSelection(context, data, state, sizes, theme, seen = state) {
  const { example, loop, pos } = seen;
  const { tokens } = data.examples[example];
  const { cell, row, top, head } = sizes;
  drawArcs(context, data, seen, sizes, theme);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.globalAlpha = 1;
  for (let k = 0; k < tokens.length; k++) {
    const x = (k + 0.5) * cell;
    const now = data.cell(example, loop, k), here = look(data, seen, loop, k);
    context.font = `${k === pos ? "bold " : ""}${sizes.font}px ${theme.mono}`;
    context.fillStyle = k === pos ? theme.text : theme.muted;
    write(context, tokens[k], x, head.tokens - 9, cell - 1);
    context.font = `12px ${theme.mono}`;
    context.fillStyle = theme.muted;
    if (now.target !== null) write(context, now.target, x, head.target - 11, cell - 2);
    context.fillStyle = theme[here.colour];
    context.globalAlpha = Math.max(here.strength, 0.04);
    context.fillRect(k * cell, head.target + 2, cell - 1, head.now - head.target - 4);
    context.globalAlpha = 1;
    const word = state.shown === "moved" ? look(data, { ...state, shown: "answer" }, loop, k).word : here.word;
    context.font = `bold 14px ${theme.mono}`;
    // a word too wide for its cell, as wide as in the rows below
    if (context.measureText(word).width > cell - 2) context.font = `bold ${Math.min(12, row - 2)}px ${theme.mono}`;
    context.fillStyle = theme.text;
    write(context, word, x, (head.target + head.now) / 2, cell - 2);
    if (here.marked) {
      context.fillStyle = theme.bad;
      context.fillRect(k * cell, head.now - 4, cell - 1, 2.5);
    }
  }
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  context.strokeRect(0.75, top + state.loop * row - 0.5, sizes.width - 1.5, row);
  context.strokeStyle = theme.focus;
  context.strokeRect(pos * cell + 0.5, head.target + 1.5, cell - 2, head.now - head.target - 3);
  if (seen !== state) context.strokeRect(pos * cell - 0.5, top + loop * row - 1.5, cell, row + 2);
  context.lineWidth = 2.5;
  context.strokeRect(state.pos * cell - 0.5, top + state.loop * row - 1.5, cell, row + 2);
}

function drawArcs(context, data, state, sizes, theme) {
  if (!data.heads.length) return;
  const { cell, head: { arcs } } = sizes, base = arcs - 3;
  const from = (state.pos + 0.5) * cell;
  data.heads.forEach((_, k) => {
    if (state.head >= 0 && state.head !== k) return;
    context.strokeStyle = context.fillStyle = HEAD_COLOURS[k % HEAD_COLOURS.length];
    const shift = data.heads.length > 1 && state.head < 0 ? ((k % 6) - 2.5) * 1.2 : 0;
    for (const { pos, weight } of data.looks(state.example, state.loop, state.pos, k)) {
      if (weight < 0.01) continue;
      context.globalAlpha = 0.25 + 0.75 * weight;
      context.lineWidth = 0.6 + 3 * weight;
      const to = (pos + 0.5) * cell + shift;
      context.beginPath();
      if (pos === state.pos) {
        context.arc(to, base - 5, 2 + 3 * weight, 0, 2 * Math.PI);
      } else {
        const high = Math.max(4, base - 12 - Math.abs(to - from) * 0.55);
        context.moveTo(from, base);
        context.bezierCurveTo(from, high, to, high, to, base);
      }
      context.stroke();
    }
  });
  context.globalAlpha = 1;
}

/* Names of the rows, at their left. */
export function drawLabels(context, data, state, sizes, theme) {
  const { loops, askedAfter, free } = data.examples[state.example];
  const { head, top, row, labels } = sizes;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = theme.muted;
  context.font = `10.5px ${theme.font}`;
  if (head.arcs) context.fillText("heads", labels - 6, head.arcs - 14);
  context.fillText("input", labels - 6, head.tokens - 9);
  if (!free) context.fillText("right", labels - 6, head.target - 11);
  const every = [1, 2, 5, 10, 20, 50].find((step) => step * row >= 13) || 100;
  for (let loop = 0; loop <= loops; loop++) {
    if (loop % every && loop !== askedAfter) continue;
    if (loop !== askedAfter && Math.abs(loop - askedAfter) * row < 13) continue;
    context.fillText(String(loop), labels - 6, top + (loop + 0.5) * row);
  }
  context.fillStyle = theme.text;
  context.font = `bold 12px ${theme.font}`;
  context.fillText(`loop ${state.loop}`, labels - 4, (head.target + head.now) / 2);
}

/* The way of one position's state through the plane, loop by loop, over that of all others. */
export function drawPlane(context, data, state, bounds, size, theme) {
  const { example, loop, pos } = state;
  const { loops, tokens } = data.examples[example];
  const pad = 12;
  const scale = (value, [least, most], length) => pad + ((value - least) / (most - least || 1)) * (length - 2 * pad);
  const at = (t, p) => {
    const [x, y] = data.cell(example, t, p).plane;
    return [scale(x, bounds[0], size.width), size.height - scale(y, bounds[1], size.height)];
  };
  context.fillStyle = theme.muted;
  context.globalAlpha = 0.35;
  for (let p = 0; p < tokens.length; p++) {
    const [x, y] = at(loop, p);
    context.fillRect(x - 1.5, y - 1.5, 3, 3);
  }
  context.globalAlpha = 1;
  context.strokeStyle = theme.accent;
  for (const [first, last, alpha] of [[0, loop, 0.9], [loop, loops, 0.25]]) {
    context.globalAlpha = alpha;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let t = first; t <= last; t++) context[t === first ? "moveTo" : "lineTo"](...at(t, pos));
    context.stroke();
  }
  context.globalAlpha = 1;
  context.fillStyle = theme.accent;
  for (let t = 0; t <= loop; t++) {
    const [x, y] = at(t, pos);
    context.beginPath();
    context.arc(x, y, t === loop ? 5 : 2, 0, 2 * Math.PI);
    context.fill();
  }
}

