/* What is shown as files: drawings as SVG, numbers as CSV. */
import { describe } from "./explorer_data.js";
import { drawLabels, drawPlane, drawRows, drawSelection, measure } from "./explorer_drawing.js";

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const ANCHORS = { center: "middle", right: "end" };

/* Takes what the drawings ask of a canvas, and writes it down as SVG. `textWidth(font, text)` is in pixels. */
export function svgContext(textWidth) {
  const parts = [];
  const n = (value) => String(Math.round(100 * value) / 100);
  let path = [];
  const add = (tag, attributes, inside = "") => {
    const all = Object.entries({ ...attributes, ...(context.globalAlpha < 1 ? { opacity: n(context.globalAlpha) } : {}) });
    parts.push(`<${tag} ${all.map(([name, value]) => `${name}="${escaped(value)}"`).join(" ")}>${inside}</${tag}>`);
  };
  const box = (x, y, width, height) => ({ x: n(x), y: n(y), width: n(Math.max(width, 0)), height: n(Math.max(height, 0)) });
  const stroked = () => ({ fill: "none", stroke: context.strokeStyle, "stroke-width": n(context.lineWidth) });
  const context = {
    globalAlpha: 1, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "10px sans-serif", textAlign: "left",
    measureText: (text) => ({ width: textWidth(context.font, text) }),
    fillRect: (...sizes) => add("rect", { ...box(...sizes), fill: context.fillStyle }),
    strokeRect: (...sizes) => add("rect", { ...box(...sizes), ...stroked() }),
    fillText(text, x, y) {
      const anchor = ANCHORS[context.textAlign] ?? "start";
      add("text", { x: n(x), y: n(y), fill: context.fillStyle, "text-anchor": anchor, "dominant-baseline": "central", style: `font: ${context.font}` }, escaped(text));
    },
    beginPath() { path = []; },
    moveTo: (x, y) => path.push(`M${n(x)} ${n(y)}`),
    lineTo: (x, y) => path.push(`L${n(x)} ${n(y)}`),
    bezierCurveTo: (...ends) => path.push(`C${ends.map(n).join(" ")}`),
    arc: (x, y, radius) => path.push(`M${n(x - radius)} ${n(y)}a${n(radius)} ${n(radius)} 0 1 0 ${n(2 * radius)} 0a${n(radius)} ${n(radius)} 0 1 0 ${n(-2 * radius)} 0`),
    stroke: () => add("path", { d: path.join(""), ...stroked() }),
    fill: () => add("path", { d: path.join(""), fill: context.fillStyle }),
    parts,
  };
  return context;
}

const file = (title, width, height, back, inside) =>
  `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">` +
  `<title>${escaped(title)}</title><rect width="${width}" height="${height}" fill="${back}"/>${inside}</svg>`;

const PAPER = 720;
const COLOURS = { answer: "blue where right, red where wrong", moved: "the stronger, the further the state moved" };

/* Which example it is. */
export function titleOf(data, { example }) {
  const { reason, detail, said } = data.examples[example];
  return [`Example ${example + 1}.`, detail || `${reason}.`, said && `${said}.`].filter(Boolean).join(" ");
}

/* What the grid shows, and where it is framed, in words. */
export function captionOf(data, state) {
  const cells = COLOURS[state.shown] ?? `${data.names[state.variable]}, green where it is what the answer implies, red where not`;
  return `${titleOf(data, state)} Across: positions; down: loops. Cells: ${cells}. Framed: ${describe(data, state)}.`;
}

/* The grid of the chosen example, with its labels, as wide as a sheet of paper. */
export function gridImage(data, state, theme, textWidth) {
  const sizes = measure(data, state.example, PAPER, (word) => textWidth(`100px ${theme.mono}`, word) / 100);
  const labels = svgContext(textWidth), grid = svgContext(textWidth);
  drawLabels(labels, data, state, sizes, theme);
  drawRows(grid, data, state, sizes, theme);
  drawSelection(grid, data, state, sizes, theme);
  const whole = Math.ceil(sizes.labels + sizes.width + 2);
  return file(titleOf(data, state), whole, Math.ceil(sizes.height + 2), theme.surface, `${labels.parts.join("")}<g transform="translate(${sizes.labels} 0)">${grid.parts.join("")}</g>`);
}

/* The state's way through the plane. */
export function planeImage(data, state, theme, textWidth) {
  const size = { width: 480, height: 360 }, plane = svgContext(textWidth);
  drawPlane(plane, data, state, data.bounds(state.example), size, theme);
  return file(`${titleOf(data, state)} ${describe(data, state)}.`, size.width, size.height, theme.surface, plane.parts.join(""));
}

const short = (value) => (value === null || Number.isNaN(value) ? "" : Number(value.toPrecision(6)));

/* A table of an example: a row for each loop and position. */
export function cellTable(data, example) {
  const { tokens, loops } = data.examples[example];
  const inner = Array.from({ length: data.inners }, (_, layer) => layer);
  const rows = [["loop", "position", "token", "right answer", "answer", "probability", "entropy in bits", "moved",
    ...data.axes, ...inner.flatMap((layer) => [`after layer ${layer}`, `its probability ${layer}`]), ...data.names.flatMap((name) => [name, `${name} by the model's answer`])]];
  for (let loop = 0; loop <= loops; loop++)
    tokens.forEach((token, pos) => {
      const { answers: [best], target, entropy, moved, plane } = data.cell(example, loop, pos);
      const layers = inner.map((layer) => data.inner(example, loop, pos, layer) ?? { symbol: "", probability: null });
      const variables = data.names.map((_, name) => data.variable(name, example, loop, pos));
      rows.push([loop, pos, token, target ?? "", best.symbol, short(best.probability), short(entropy), short(moved),
        ...(plane ?? []).map(short), ...layers.flatMap((one) => [one.symbol, short(one.probability)]), ...variables.flatMap(({ value, implied }) => [value ?? "", implied ?? ""])]);
    });
  return rows;
}

/* The same for attention: a row for each weight that is kept. */
export function attentionTable(data, example) {
  const { tokens, loops } = data.examples[example];
  const rows = [["loop", "head", "position", "looks at", "weight"]];
  for (let loop = 1; loop <= loops; loop++)
    data.heads.forEach(({ name }, head) =>
      tokens.forEach((_, pos) => {
        for (const { pos: to, weight } of data.looks(example, loop, pos, head)) rows.push([loop, name, pos, to, short(weight)]);
      }));
  return rows;
}

/* Rows as CSV. A text that a spreadsheet would run has an apostrophe before it. */
export function csv(rows) {
  const cell = (value) => {
    const text = typeof value === "string" ? value.replace(/^[=+\-@\t\r\n]/, "'$&") : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

/* What a control asks for as a file: its text, its type, and its name. */
export function fileOf(what, data, state, theme, textWidth) {
  const name = `example-${state.example + 1}`, svg = "image/svg+xml", table = "text/csv;charset=utf-8";
  if (what === "grid") return [gridImage(data, state, theme, textWidth), svg, `${name}-loops.svg`];
  if (what === "plane") return [planeImage(data, state, theme, textWidth), svg, `${name}-position-${state.pos}-state.svg`];
  if (what === "attention") return [csv(attentionTable(data, state.example)), table, `${name}-attention.csv`];
  return [csv(cellTable(data, state.example)), table, `${name}.csv`];
}
