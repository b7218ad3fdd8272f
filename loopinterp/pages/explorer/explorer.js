/* The explorer: mount(element, data, options) shows an exploration in an element.
   All text reaches the page as text; every panel shows the one selection of explorer_state.js. */
import { decode, describe, inflate, spell } from "./explorer_data.js";
import { address, followed, initial, keyed, placed, previewed, reduce } from "./explorer_state.js";
import { captionOf, fileOf, gridImage } from "./explorer_files.js";
import { HEAD_COLOURS, drawLabels, drawPlane, drawRows, drawSelection, measure, placeAt } from "./explorer_drawing.js";

/* A run plays in some three seconds; a short one no faster than can be followed. */
const tick = (loops) => Math.min(350, Math.max(60, 3000 / Math.max(loops, 1)));
let mounted = 0;

const make = (tag, properties = {}, ...children) => {
  const { aria = {}, ...rest } = properties;
  const node = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(aria)) node.setAttribute(name === "role" ? name : `aria-${name}`, value);
  node.append(...children);
  return node;
};

const option = (value, text) => make("option", { value: String(value) }, text);

/* Colours as the page has them now: a canvas knows no variables. */
function themeOf(element) {
  const probe = element.appendChild(make("span"));
  const theme = { mono: getComputedStyle(element).getPropertyValue("--x-mono"), font: getComputedStyle(element).fontFamily };
  for (const name of ["text", "muted", "surface", "accent", "good", "bad", "moved", "focus"]) {
    probe.style.color = `var(--x-${name})`;
    theme[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return theme;
}

/* A canvas of a size in pixels of the page, sharp on any screen, cleared. */
function sized(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  if (canvas.style) Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/* Radio buttons that look like chips; `choose` is called with the index of the one chosen. */
function chips(legend, name, texts, choose) {
  const inputs = texts.map((text, k) => {
    const input = make("input", { type: "radio", name, value: String(k) });
    input.addEventListener("change", () => choose(k));
    return input;
  });
  const labels = texts.map((text, k) => make("label", {}, inputs[k], make("span", {}, text)));
  const group = make("fieldset", { className: "x-chips" }, make("legend", {}, legend), ...labels);
  return { group, show: (k) => { inputs[k].checked = true; } };
}

/* A table whose rows are made once and filled at each step. */
function table(caption, columns) {
  const body = make("tbody");
  const head = make("tr", {}, ...columns.map((text) => make("th", { scope: "col" }, text)));
  const element = make("table", {}, make("caption", {}, caption), make("thead", {}, head), body);
  const fill = (rows) => {
    while (body.rows.length < rows.length) body.append(make("tr", {}, ...columns.map(() => make("td"))));
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach(({ cells, mark = "", colour = "", share = null }, k) => {
      const row = body.rows[k];
      row.className = mark;
      row.style.setProperty("--x-share", share === null ? "0%" : `${100 * share}%`);
      row.style.setProperty("--x-key", colour || "transparent");
      cells.forEach((text, column) => {
        if (row.cells[column].textContent !== text) row.cells[column].textContent = text;
      });
    });
  };
  return { element, fill };
}

const panel = (title, ...children) => make("div", { className: "x-panel", aria: { role: "group", label: title } }, make("h3", {}, title), ...children);

/* Everything that is seen, made once; drawing fills it. */
function build(data, id, act, linked) {
  const parts = {};
  parts.examples = chips("Example", `${id}-example`, data.examples.map((one, k) => `${k + 1} · ${one.reason}`), (example) => act({ set: { example } }));
  parts.detail = make("p", { className: "x-detail" });
  parts.said = make("p", { className: "x-said" });
  const kinds = { answer: "answers", moved: "residual", variable: "program against model" };
  parts.shown = chips("Cells show", `${id}-shown`, data.shown.map((kind) => kinds[kind]), (k) => act({ set: { shown: data.shown[k] } }));
  parts.variable = make("select", {}, ...data.names.map((name, k) => option(k, name)));
  parts.variable.addEventListener("change", () => act({ set: { variable: Number(parts.variable.value), shown: "variable" } }));
  parts.head = make("select", {}, option(-1, "all heads"), ...data.heads.map((head, k) => option(k, head.name)));
  parts.head.addEventListener("change", () => act({ set: { head: Number(parts.head.value) } }));
  parts.layer = make("select", {}, option(-1, "the whole loop"), ...Array.from({ length: data.inners }, (_, k) => option(k, `layer ${k}`)));
  parts.layer.addEventListener("change", () => act({ set: { layer: Number(parts.layer.value), shown: "answer" } }));
  parts.layerLabel = make("label", { className: "x-select" }, "Read after ", parts.layer);
  parts.variableLabel = make("label", { className: "x-select" }, "Variable ", parts.variable);
  parts.headLabel = make("label", { className: "x-select" }, "Arcs of ", parts.head);
  parts.play = make("button", { type: "button", className: "x-play" }, "Play");
  parts.play.addEventListener("click", () => act("play"));
  parts.slider = make("input", { type: "range", min: 0, step: 1, aria: { label: "Loop" } });
  parts.slider.addEventListener("input", () => act({ set: { loop: Number(parts.slider.value) } }));
  parts.output = make("output");
  parts.labels = make("canvas", { aria: { hidden: "true" } });
  parts.canvas = make("canvas", { aria: { hidden: "true" } });
  parts.help = make("p", { className: "x-help", id: `${id}-help` },
    "Point at a cell to look, click to choose it, or use the arrow keys. Page Up and Page Down change the example; the space bar plays.");
  parts.scroll = make("div", { className: "x-scroll", tabIndex: 0, aria: { role: "application", label: "Loops by positions", describedby: parts.help.id } }, parts.canvas);
  parts.live = make("p", { className: "x-sr", aria: { live: "polite" } });
  parts.answers = table("Answers if read here", ["answer", "probability"]);
  parts.facts = make("dl", { className: "x-facts" });
  parts.looks = table("Attention of each head", ["head", "position", "attention"]);
  parts.plane = make("canvas", { className: "x-plane", aria: { role: "img", label: "" } });
  parts.planeText = make("p", { className: "x-note" });
  parts.programs = table("Value in the program, and the value that the answer implies", ["variable", "program", "answer"]);
  parts.place = panel("Answers", parts.answers.element, parts.facts);
  const scrolled = (title, made) => make("div", { className: "x-tall", tabIndex: 0, aria: { role: "group", label: `${title}, all rows` } }, made.element);
  parts.panels = make("div", { className: "x-panels" }, parts.place,
    ...(data.has("plane") ? [panel("State", parts.plane, parts.planeText)] : []),
    ...(data.heads.length ? [panel("Attention", scrolled("Attention", parts.looks))] : []),
    ...(data.names.length ? [make("details", { className: "x-panel x-programs", open: !linked, aria: { role: "group", label: "Programs" } }, make("summary", {}, "Programs"), scrolled("Programs", parts.programs))] : []));
  const files = { grid: "Image (SVG)", ...(data.has("plane") ? { plane: "State (SVG)" } : {}), cells: "Data (CSV)", ...(data.heads.length ? { attention: "Attention (CSV)" } : {}) };
  const links = Object.entries(files).map(([what, text]) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => act({ save: what }));
    return button;
  });
  if (linked) {
    const copy = make("button", { type: "button" }, "Copy link");
    copy.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(location.href);
      copy.textContent = "Link copied";
    });
    links.push(copy);
  }
  parts.print = make("div", { className: "x-print" });
  const missing = Object.entries(data.missing).map(([what, why]) => `Not shown: ${what}, as ${why}.`).join(" ");
  parts.all = [
    ...(data.examples.length > 1 ? [parts.examples.group] : []),
    make("div", { className: "x-steps" }, parts.play, parts.slider, parts.output),
    make("div", { className: "x-main" },
      make("div", { className: "x-left" },
        make("div", { className: "x-grid" }, parts.labels, parts.scroll),
        make("div", {}, parts.detail, parts.said),
        make("div", { className: "x-bar" }, parts.shown.group, ...(data.inners ? [parts.layerLabel] : []), ...(data.names.length ? [parts.variableLabel] : []), ...(data.heads.length ? [parts.headLabel] : []))),
      parts.panels),
    parts.print, parts.live,
    ...(missing ? [make("p", { className: "x-note" }, missing)] : []), make("p", { className: "x-links" }, ...links), parts.help,
  ];
  return parts;
}

function fillFacts(list, facts) {
  const texts = facts.flat();
  if (list.childElementCount !== texts.length)
    list.replaceChildren(...facts.flatMap(([name]) => [make("dt", {}, name), make("dd")]));
  texts.forEach((text, k) => {
    if (list.children[k].textContent !== text) list.children[k].textContent = text;
  });
}

function fillPanels(parts, data, state) {
  const { example, loop, pos, head } = state;
  const { tokens } = data.examples[example];
  const cell = data.cell(example, loop, pos);
  parts.answers.fill(cell.answers.map((one, rank) => ({
    cells: cell.open ? ["?", "left open"] : [one.symbol, one.probability?.toFixed(4) ?? ""], share: one.probability,
    mark: rank ? "" : cell.right === false ? "bad" : cell.right ? "good" : "",
  })));
  const inside = Array.from({ length: loop ? data.inners : 0 }, (_, k) => {
    const { symbol, probability } = data.inner(example, loop, pos, k);
    return [`layer ${k}`, `${symbol} ${probability.toFixed(4)}`];
  });
  fillFacts(parts.facts, [
    ["right answer", cell.target ?? "none"], ...(data.has("entropy") ? [["entropy (bits)", spell(cell.entropy)]] : []),
    ...(data.has("moved") ? [["residual", loop ? spell(cell.moved) : "–"]] : []), ...inside,
  ]);
  parts.looks.fill(data.heads.flatMap(({ name }, k) =>
    head >= 0 && head !== k ? [] : data.looks(example, loop, pos, k).filter((one, nth) => nth < 4 || head === k).map((one) => ({
      cells: [name, `${one.pos} · ${tokens[one.pos]}`, one.weight.toFixed(4)],
      share: one.weight, colour: HEAD_COLOURS[k % HEAD_COLOURS.length],
    }))));
  parts.programs.fill(data.names.map((name, k) => {
    const { value, implied, agrees } = data.variable(k, example, loop, pos);
    const word = (x) => (x === null ? "–" : x === -1 ? "unknown" : String(x));
    return { cells: [name, word(value), word(implied)], mark: `${agrees === null ? "" : agrees ? "good" : "bad"}${k === state.variable && state.shown === "variable" ? " on" : ""}` };
  }));
  if (!cell.plane) return;
  const [x, y] = cell.plane;
  parts.planeText.textContent = `${data.axes[0]}: ${spell(x)}; ${data.axes[1]}: ${spell(y)}. Line: this position, loop by loop; dots: all positions now.`;
  parts.plane.setAttribute("aria-label", `State of position ${pos} after loop ${loop} at ${spell(x)}, ${spell(y)}`);
}

/* Offers a text as a file. */
function save(text, type, name) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/* Keeps the selected position in view, sideways only. */
function reveal(scroll, left, width) {
  if (left < scroll.scrollLeft) scroll.scrollLeft = left - width;
  else if (left + width > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = left + 2 * width - scroll.clientWidth;
}

/* Shows what a page is given in an element, as soon as its bytes are unpacked. */
export async function mount(element, payload, options = {}) {
  return show(element, decode(await inflate(payload)), options);
}

function show(element, data, options) {
  const id = `explorer-${++mounted}`;
  let state = initial(data, options.state);
  let preview = null, pointer = null, frame = 0; // what a pointer looks at, without choosing it
  let sizes, theme, rows, drawnFor = "", planeBounds = [], timer = null;
  const listeners = new Set();

  const act = (action) => (action.save ? save(...fileOf(action.save, data, state, theme, textWidth)) : dispatch(action));
  const parts = build(data, id, act, options.linked);
  element.classList.add("explorer");
  element.replaceChildren(...parts.all);

  /* One that follows another leaves it to that one to say where they are. */
  function dispatch(action, follows = false) {
    const before = state;
    state = reduce(state, action, data);
    preview = null;
    clearTimeout(timer);
    if (state.playing) timer = setTimeout(() => dispatch("tick"), tick(data.examples[state.example].loops));
    draw();
    reveal(parts.scroll, state.pos * sizes.cell, sizes.cell);
    if (follows) parts.live.textContent = "";
    for (const heard of listeners) heard(state, before, action);
  }

  function resize() {
    theme = themeOf(element);
    drawnFor = "";
    draw();
    reveal(parts.scroll, state.pos * sizes.cell, sizes.cell);
  }

  const ruler = document.createElement("canvas").getContext("2d");
  const textWidth = (font, text) => {
    ruler.font = font;
    return ruler.measureText(text).width;
  };

  /* On paper: the chosen example as a drawing of lines, in light colours whatever the screen has. */
  function print() {
    const { colorScheme } = element.style;
    element.style.colorScheme = "light";
    const image = new DOMParser().parseFromString(gridImage(data, state, themeOf(element), textWidth), "image/svg+xml");
    element.style.colorScheme = colorScheme;
    parts.print.replaceChildren(document.importNode(image.documentElement, true), make("p", { className: "x-note" }, captionOf(data, state)));
  }

  function draw() {
    const seen = preview ?? state;
    const example = data.examples[state.example];
    const kind = [state.example, state.shown, state.layer, state.shown === "variable" ? state.variable : ""].join();
    if (kind !== drawnFor) {
      const context = parts.canvas.getContext("2d");
      context.font = `100px ${theme.mono}`;
      sizes = measure(data, state.example, element.clientWidth || 600, (word) => context.measureText(word).width / 100);
      rows ??= document.createElement("canvas");
      // A short example leaves room for the panels beside it.
      element.classList.toggle("x-narrow", sizes.labels + sizes.width < 0.55 * element.clientWidth);
      drawRows(sized(rows, sizes.width, sizes.height), data, state, sizes, theme);
      planeBounds = data.has("plane") ? data.bounds(state.example) : [];
      drawnFor = kind;
    }
    const context = sized(parts.canvas, sizes.width, sizes.height);
    context.drawImage(rows, 0, 0, sizes.width, sizes.height);
    drawSelection(context, data, state, sizes, theme, seen);
    drawLabels(sized(parts.labels, sizes.labels, sizes.height), data, seen, sizes, theme);
    if (data.has("plane")) {
      const plane = { width: Math.max(parts.planeText.clientWidth, 160), height: 150 };
      drawPlane(sized(parts.plane, plane.width, plane.height), data, seen, planeBounds, plane, theme);
    }
    fillPanels(parts, data, seen);
    if (preview) return;
    parts.examples.show(state.example);
    parts.shown.show(data.shown.indexOf(state.shown));
    parts.variable.value = String(state.variable);
    parts.head.value = String(state.head);
    parts.layer.value = String(state.layer);
    parts.detail.textContent = example.detail;
    parts.said.textContent = example.said;
    parts.slider.max = String(example.loops);
    parts.slider.value = String(state.loop);
    const asked = state.loop === example.askedAfter && !example.free ? ", scored" : "";
    parts.output.textContent = `loop ${state.loop} of ${example.loops}${asked}`;
    parts.slider.setAttribute("aria-valuetext", parts.output.textContent);
    parts.play.textContent = state.playing ? "Pause" : "Play";
    if (!state.playing) parts.live.textContent = describe(data, state);
  }

  parts.scroll.addEventListener("keydown", (event) => {
    const action = keyed(event);
    if (!action) return;
    event.preventDefault();
    dispatch(action);
  });
  const under = (event) => {
    const box = parts.canvas.getBoundingClientRect();
    return placeAt(sizes, event.clientX - box.left, event.clientY - box.top);
  };
  const point = (event) => {
    const { pos, loop } = under(event);
    dispatch({ set: { pos, ...(loop === null ? {} : { loop }) } });
  };
  /* Looks where the pointer is, once a frame; a finger has no place until it taps, which chooses. */
  const hover = (place) => {
    pointer = place;
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const next = pointer && previewed(state, pointer, data);
      if (next?.loop === preview?.loop && next?.pos === preview?.pos) return;
      preview = next;
      draw();
    });
  };
  parts.canvas.addEventListener("click", point);
  parts.canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    if (event.buttons === 1) point(event);
    else hover(under(event));
  });
  parts.canvas.addEventListener("pointerleave", () => hover(null));

  let width = 0;
  const resized = new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - width) < 1) return;
    width = element.clientWidth;
    resize();
  });
  const themed = new MutationObserver(resize);
  themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", resize);
  addEventListener("beforeprint", print);
  width = element.clientWidth;
  resize();
  resized.observe(element);

  /* The page's address follows the selection, so that a state can be sent as a link. */
  const follow = () => {
    const place = placed(location.hash);
    if (!place) return false;
    element.scrollIntoView({ block: "nearest" });
    dispatch({ set: place });
    return true;
  };
  if (options.linked) {
    addEventListener("hashchange", follow);
    listeners.add(() => state.playing || history.replaceState(null, "", address(state)));
  }
  if (!(options.linked && follow()) && options.play && !matchMedia("(prefers-reduced-motion: reduce)").matches)
    dispatch({ set: { loop: 0 } }), dispatch("play");

  const handle = {
    data,
    get state() { return state; },
    select: (set) => dispatch({ set }),
    follow: (set) => dispatch({ set }, true),
    dispatch,
    subscribe: (heard) => { listeners.add(heard); return () => listeners.delete(heard); },
    destroy() {
      clearTimeout(timer);
      cancelAnimationFrame(frame);
      removeEventListener("beforeprint", print);
      removeEventListener("hashchange", follow);
      resized.disconnect();
      themed.disconnect();
      scheme.removeEventListener("change", resize);
      element.replaceChildren();
    },
  };
  element.explorer = handle;
  return handle;
}

/* Explorers in step, the others with the first: what is chosen in one is chosen in all. Returns what ends it. */
export function together(handles) {
  let led = false;
  const lead = (leader, after, before, action) => {
    if (led) return;
    led = true;
    for (const one of handles) {
      if (one === leader) continue;
      const set = followed(one.state, one.data, before, after, action, leader.data);
      if (Object.keys(set).some((name) => set[name] !== one.state[name])) one.follow(set);
    }
    led = false;
  };
  const ends = handles.map((one) => one.subscribe((...heard) => lead(one, ...heard)));
  if (handles.length) lead(handles[0], handles[0].state, null, null);
  return () => ends.forEach((end) => end());
}
