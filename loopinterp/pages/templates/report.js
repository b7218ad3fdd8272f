"use strict";
/* Draws each figure when it comes near the view; legend, colour bar and slider are HTML. */
const report = (() => {
  const figures = [...document.querySelectorAll("figure.card:not(.with-circuit)")].map((element) => ({ element, drawn: false }));
  const config = { displayModeBar: false, scrollZoom: false, doubleClick: false, showTips: false, responsive: false };
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  /* On paper figures are drawn wider than it is and scaled down, tall ones further: none is larger than a sheet. */
  const PAPER = { width: 800, shown: 640, height: 680 };
  let printing = false, unfolded = [];

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  /* A name in a figure has its foreign tags escaped for Plotly; elsewhere it is plain text. */
  const shownText = (text) => text.replaceAll("&lt;", "<");
  const svg = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  function prepare(figure) {
    figure.plot = figure.element.querySelector(".plot");
    figure.spec = JSON.parse(figure.element.querySelector(".figure-json").textContent);
    figure.plot.style.minHeight = `${layoutOf(figure).height || 420}px`;
    const controls = figure.element.querySelector(".controls");
    const frames = figure.spec.frames || [];
    if (frames.length > 1) figure.element.querySelector(".above").append(slider(figure, frames));
    const legend = legendOf(figure);
    if (legend) controls.append(legend);
    const bar = colourBar(figure.spec.layout.coloraxis);
    if (bar) controls.append(bar);
    figure.element.querySelector(".save-image").addEventListener("click", () => saveImage(figure));
  }

  /* Figures in a closed fold have no width of their own yet: all figures are equally wide. */
  const shownWidth = () => Math.max(0, ...figures.map((figure) => (figure.plot ? figure.plot.clientWidth : 0)));
  const widthOf = (figure) => (printing ? PAPER.width : Math.floor(figure.plot.clientWidth || shownWidth()));
  const layoutOf = (figure) => figureLayout.adapt(figure.spec, widthOf(figure), printing ? PAPER.height : Infinity);

  /* Plotly, the part of it for flat figures or all of it: each is run when a figure first needs it. */
  const libraries = {};
  function libraryOf({ element: { dataset: { library } } }) {
    if (!libraries[library]) {
      document.head.append(make("script", { textContent: document.getElementById(library).textContent }));
      libraries[library] = window.Plotly;
    }
    return libraries[library];
  }

  function draw(figure) {
    const library = libraryOf(figure);
    figure.width = widthOf(figure);
    const method = figure.drawn ? library.react : library.newPlot;
    const layout = layoutOf(figure);
    figure.drawn = true;
    figure.plot.style.zoom = "";
    return method(figure.plot, figure.spec.data, layout, config).then(() => {
      if (printing) figure.plot.style.zoom = Math.min(PAPER.shown / PAPER.width, PAPER.height / layout.height);
      figure.plot.style.minHeight = "";
      figure.element.dataset.drawn = "true";
    });
  }
  const redraw = () => figures.filter((figure) => figure.drawn).forEach(draw);
  const unfold = () => {
    const closed = [...document.querySelectorAll("details:not([open])")];
    for (const fold of closed) fold.open = true;
    return closed;
  };
  const drawAll = () => {
    unfold();
    return Promise.all(figures.map(draw));
  };

  /* Legend: one button for each name; it hides and shows the lines of that name. */
  function legendOf(figure) {
    const groups = new Map();
    for (const trace of figure.spec.data) {
      if (trace.type === "heatmap" || !trace.name) continue;
      const key = trace.legendgroup || trace.name;
      if (!groups.has(key)) groups.set(key, { traces: [], shown: null });
      const group = groups.get(key);
      group.traces.push(trace);
      if (trace.showlegend !== false && !group.shown) group.shown = trace;
    }
    const shown = [...groups.values()].filter((group) => group.shown);
    const overHeat = figure.spec.data.some((trace) => trace.type === "heatmap");
    if (figure.spec.layout.showlegend === false || shown.length < (overHeat ? 1 : 2)) return null;
    const list = make("div", { className: "legend" });
    list.setAttribute("role", "group");
    list.setAttribute("aria-label", "Lines shown");
    for (const group of shown) {
      const button = make("button", { type: "button" }, swatch(group.shown), shownText(group.shown.name));
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        for (const trace of group.traces) trace.visible = on;
        draw(figure);
      });
      list.append(button);
    }
    return list;
  }

  function swatch(trace) {
    const isBar = trace.type === "bar";
    const box = svg("svg", { width: isBar ? 12 : 30, height: 12, "aria-hidden": "true" });
    const line = trace.line || {}, marker = trace.marker || {};
    const colour = line.color || marker.color || "currentColor";
    if (isBar) {
      const hatched = marker.pattern && marker.pattern.shape;
      box.append(svg("rect", { x: 0.5, y: 0.5, width: 11, height: 11, rx: 2, fill: colour, "fill-opacity": hatched ? 0.35 : 1, stroke: colour }));
      return box;
    }
    const dash = { dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 4", longdashdot: "10 3 2 3" }[line.dash] || "";
    box.append(svg("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: colour, "stroke-width": 2.2, "stroke-dasharray": dash }));
    if ((trace.mode || "").includes("markers") && !Array.isArray(marker.symbol)) {
      const shapes = { square: "M11 2h8v8h-8z", diamond: "M15 1l5 5-5 5-5-5z", "triangle-up": "M15 1.5l5 8.5H10z", cross: "M13.4 1.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2V7.6h-2.9V4.4h2.9z",
        x: "M11 3.4l1.4-1.4 2.6 2.6 2.6-2.6 1.4 1.4L16.4 6l2.6 2.6-1.4 1.4-2.6-2.6-2.6 2.6-1.4-1.4L13.6 6z", "triangle-down": "M15 10.5l5-8.5H10z", star: "M15 0.5L16.4 4.1L20.2 4.3L17.2 6.7L18.2 10.4L15 8.3L11.8 10.4L12.8 6.7L9.8 4.3L13.6 4.1z", pentagon: "M15 1L19.8 4.5L17.9 10L12.1 10L10.2 4.5z", hexagon: "M15 1L19.3 3.5L19.3 8.5L15 11L10.7 8.5L10.7 3.5z", bowtie: "M10 2l10 8V2l-10 8z", hourglass: "M11 1h8l-8 10h8z" };
      const shape = shapes[marker.symbol];
      box.append(shape ? svg("path", { d: shape, fill: colour }) : svg("circle", { cx: 15, cy: 6, r: 4, fill: colour }));
    }
    return box;
  }

  function colourBar(axis) {
    if (!axis || !Array.isArray(axis.colorscale)) return null;
    const stops = axis.colorscale.map(([at, colour]) => `${colour} ${at * 100}%`).join(", ");
    const shown = (value) =>
      value && Math.abs(value) < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
    const strip = make("div", { className: "strip" });
    strip.style.background = `linear-gradient(to right, ${stops})`;
    const ends = [axis.cmin, (axis.cmin + axis.cmax) / 2, axis.cmax].map((v) => make("span", {}, shown(v)));
    const title = (axis.colorbar && axis.colorbar.title && axis.colorbar.title.text) || "";
    return make("div", { className: "colour-bar" }, make("span", {}, shownText(title)), strip, make("div", { className: "ends" }, ...ends));
  }

  function slider(figure, frames) {
    const input = make("input", { type: "range", min: 0, max: frames.length - 1, step: 1, value: 0 });
    const output = make("output", {});
    const play = make("button", { type: "button" }, "Play");
    let timer = null;
    const show = () => {
      const frame = frames[input.value];
      frame.data.forEach((data, k) => { figure.spec.data[frame.traces ? frame.traces[k] : k].z = data.z; });
      output.textContent = `loop ${frame.name} of ${frames[frames.length - 1].name}`;
      input.setAttribute("aria-valuetext", output.textContent);
      if (figure.drawn) draw(figure);
    };
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    };
    input.setAttribute("aria-label", "Loop");
    input.addEventListener("input", () => { stop(); show(); });
    play.addEventListener("click", () => {
      if (timer || calm.matches) return stop();
      play.textContent = "Pause";
      timer = setInterval(() => {
        input.value = (Number(input.value) + 1) % frames.length;
        show();
      }, 700);
    });
    show();
    return make("div", { className: "loop-slider" }, play, input, output);
  }

  function saveImage(figure) {
    const style = getComputedStyle(figure.element);
    draw(figure).then(() => {
      const layout = { ...layoutOf(figure), paper_bgcolor: style.backgroundColor, showlegend: true };
      layout.height += 70;
      layout.margin = { ...layout.margin, t: layout.margin.t + 70 };
      layout.legend = { orientation: "h", x: 0, y: 0.99, yanchor: "top", yref: "container" };
      if (layout.coloraxis) layout.coloraxis.showscale = true;
      const image = { data: figure.spec.data, layout, config };
      return libraryOf(figure).downloadImage(image, { format: "svg", width: layout.width, height: layout.height, filename: figure.element.id });
    });
  }

  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      draw(figures.find((figure) => figure.element === entry.target));
    }
  }, { rootMargin: "400px 0px" });
  const resized = new ResizeObserver(() => {
    for (const figure of figures)
      if (figure.drawn && !printing && Math.abs(widthOf(figure) - figure.width) > 1) draw(figure);
  });
  for (const figure of figures) {
    prepare(figure); // its height is then known, so links into the page land where they should
    resized.observe(figure.element);
  }
  // What stands at the head of the page comes before what takes Plotly's script.
  Promise.resolve(window.explored).then(() => figures.forEach((figure) => near.observe(figure.element)));

  let screenTheme;
  const forPrint = (on) => {
    const { dataset } = document.documentElement;
    if (on && !printing) screenTheme = dataset.theme;
    if (on) dataset.theme = "light"; // paper is white
    else if (screenTheme) dataset.theme = screenTheme;
    else delete dataset.theme;
    printing = on;
    if (on) {
      unfolded = [...unfolded, ...unfold()];
      figures.forEach(draw);
    } else {
      for (const fold of unfolded.splice(0)) fold.open = false;
      redraw();
    }
  };
  addEventListener("beforeprint", () => forPrint(true));
  addEventListener("afterprint", () => forPrint(false));
  return { drawAll, redraw };
})();

/* Light or dark: the reader's choice, else the system's. */
(() => {
  const button = document.querySelector("button.theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.querySelector(".theme-word").textContent = isDark() ? "Light" : "Dark";
    report.redraw();
  };
  try {
    const kept = localStorage.getItem("loopinterp-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* storage can be switched off; the choice then lasts as long as the page */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("loopinterp-theme", root.dataset.theme);
    } catch { /* as above */ }
    show();
  });
  system.addEventListener("change", show);
  show();
})();

/* The contents mark the section in view. */
(() => {
  const links = new Map([...document.querySelectorAll(".contents > ol > li > a")].map((a) => [a.hash.slice(1), a]));
  const sections = [...document.querySelectorAll("main > header[id], main > section")];
  const mark = () => {
    const current = sections.filter((s) => s.getBoundingClientRect().top < innerHeight * 0.35).pop() || sections[0];
    for (const [id, link] of links) {
      const is = id === current.id;
      if (is === link.hasAttribute("aria-current")) continue;
      link.toggleAttribute("aria-current", is);
      if (is) {
        link.setAttribute("aria-current", "location");
        const bar = link.closest(".contents > ol");
        if (bar.scrollWidth > bar.clientWidth) bar.scrollLeft = link.offsetLeft - bar.offsetLeft - 40;
      }
    }
  };
  /* A link to a figure in a closed fold opens the fold. */
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    const closed = "details:not([open])";
    const fold = target && (target.closest(closed) || (target.matches(".folded") && target.querySelector(closed)));
    if (!fold) return;
    fold.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  let waiting = false;
  const markSoon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; mark(); });
  };
  addEventListener("scroll", markSoon, { passive: true });
  new ResizeObserver(markSoon).observe(document.body); // sections move as the explorer is drawn
  mark();
})();

document.querySelector("button.copy")?.addEventListener("click", async (event) => {
  const text = document.querySelector(".command code").textContent;
  try {
    await navigator.clipboard.writeText(text);
    event.target.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(document.querySelector(".command code"));
    event.target.textContent = "Selected";
  }
});
