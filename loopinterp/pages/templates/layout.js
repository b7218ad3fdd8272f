"use strict";
/* Lays a figure out for the width it has: panels in fewer columns, fewer ticks, wrapped words.
   Figures made by loopinterp.plotting say how many panels they have in layout.meta. */
const figureLayout = (() => {
  const canvas = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.documentElement).getPropertyValue("--font");
  const axisName = (letter, panel) => letter + "axis" + (panel ? panel + 1 : "");
  const axisRef = (letter, panel) => letter + (panel ? panel + 1 : "");
  const lineCount = (text) => (text ? text.split("<br>").length : 0);
  const titleOf = (axis) => (axis.title && axis.title.text) || "";

  /* Width in pixels of the longest line of some texts; a panel's title is bold. */
  function longest(texts, size) {
    const lines = texts.flatMap((text) => String(text).split("<br>"));
    return Math.max(0, ...lines.map((line) => {
      const plain = line.replace(/<\/?b>/g, "");
      canvas.font = `${plain === line ? "" : "bold "}${size}px ${family}`;
      return canvas.measureText(plain).width;
    }));
  }

  /* Breaks a text at its spaces into lines of at most so many pixels. */
  function wrap(text, most, size) {
    const bold = String(text).startsWith("<b>") ? "<b>" : "";
    const lines = [];
    for (const word of String(text).split(" ")) {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (lines.length && longest([bold + longer], size) <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines.join("<br>");
  }

  /* Names along an axis that holds categories, or null. */
  function namesAlong(data, letter, panel) {
    const isNamed = (values) => Array.isArray(values) && values.some((v) => typeof v === "string" && isNaN(v));
    const found = new Set();
    for (const trace of data) {
      if ((trace[letter + "axis"] || letter) !== axisRef(letter, panel) || !isNamed(trace[letter])) continue;
      for (const name of trace[letter]) found.add(name);
    }
    return found.size ? [...found] : null;
  }

  /* Colours of text and hover boxes, from the page's own. */
  function theme(layout, data) {
    const probe = document.createElement("span");
    document.body.append(probe);
    const colour = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const text = colour("--text"), surface = colour("--surface"), border = colour("--line");
    probe.remove();
    layout.font = { ...layout.font, family, color: text };
    layout.hoverlabel = { bgcolor: surface, bordercolor: border, font: { color: text, size: 13 }, align: "left" };
    for (const trace of data) {
      for (const bars of [trace.error_x, trace.error_y]) if (bars) bars.color = text;
      if (trace.textfont && !trace.textfont.shadow) trace.textfont.color = text; // words in cells
    }
  }

  /* Whether all that stands along a panel's x-axis are whole numbers, which have nothing between. */
  const isWhole = (data, panel) => data.every((trace) => (trace.xaxis || "x") !== axisRef("x", panel)
    || (Array.isArray(trace.x) && trace.x.every((x) => x === null || Number.isInteger(x))));

  /* Sizes in pixels: of text, margins, panels, and how many panels stand side by side. */
  function plan(spec, layout, meta, width, most) {
    const narrow = width < 560, size = narrow ? 12 : 14;
    const panels = [...Array(meta.panels).keys()].map((k) => ({
      x: layout[axisName("x", k)],
      y: layout[axisName("y", k)],
      xNames: namesAlong(spec.data, "x", k),
      yNames: namesAlong(spec.data, "y", k),
      whole: isWhole(spec.data, k),
    }));
    const p = { width, narrow, size, panels, line: size * 1.3 };
    p.grid = meta.columns > 1 || meta.square;
    p.xTitle = panels.map((panel) => titleOf(panel.x)).find(Boolean) || "";
    p.yTitle = panels.map((panel) => titleOf(panel.y)).find(Boolean) || "";
    // The first panel of a row has the title of all in it.
    panels.forEach((panel, k) => { panel.yTitle = titleOf(panel.y) || (k ? panels[k - 1].yTitle : p.yTitle); });

    const number = panels[0].y.type === "log" ? "0.000" : "0.25";
    for (const panel of panels) panel.yLabels = panel.yNames && panel.yNames.map((name) => wrap(name, narrow ? 84 : 220, size));
    const labels = Math.max(...panels.map((panel) => longest(panel.yLabels || [number], size)));
    p.left = Math.ceil(labels + 12 + (p.yTitle ? size * 1.9 : 0));
    p.right = 14;
    p.inside = width - p.left - p.right;

    // Columns: as many as leave every panel a readable width, more of it where it has many cells.
    p.gapX = p.grid ? 22 : 0;
    const cells = Math.max(...spec.data.map((trace) => (trace.type === "heatmap" && trace.x ? trace.x.length : 0)));
    const words = spec.data.some((trace) => (trace.mode || "").includes("text")); // which need room
    const least = meta.square ? (narrow && !words ? 96 : 150) : Math.min(220, Math.max(96, 9 * cells));
    p.columns = Math.min(meta.columns, meta.panels);
    const share = () => (p.inside - p.gapX * (p.columns - 1)) / p.columns;
    while (p.columns > 1 && share() < least) p.columns = p.columns > 2 ? Math.ceil(p.columns / 2) : 1;
    p.rows = Math.ceil(meta.panels / p.columns);
    p.w = meta.square ? Math.min(share(), 460) : share();
    p.h = meta.square ? p.w : meta.panel_height;
    if (narrow && !meta.square && panels.every((panel) => !panel.yNames)) p.h = Math.min(p.h, 250);
    if (!meta.square) p.h = Math.min(p.h, Math.max(most / p.rows, 110));
    for (const { yLabels } of panels)
      if (yLabels && !meta.square && (yLabels.length <= 20 || spec.data.some((trace) => trace.type === "bar")))
        p.h = Math.max(p.h, yLabels.length * (Math.max(...yLabels.map(lineCount)) * p.line + 4));
    return p;
  }

  /* Names below the panels: side by side, else in two or three lines, else upright. */
  function planNames(p) {
    p.upright = false;
    p.tickRoom = p.size * 1.9;
    for (const panel of p.panels) {
      if (!panel.xNames) continue;
      const each = p.w / panel.xNames.length - 8;
      panel.xLabels = panel.xNames;
      if (longest(panel.xNames, p.size) <= each) continue;
      const wrapped = panel.xNames.map((name) => wrap(name, each, p.size));
      const lines = Math.max(...wrapped.map(lineCount));
      if (longest(wrapped, p.size) <= each && lines <= 3) {
        panel.xLabels = wrapped;
        p.tickRoom = Math.max(p.tickRoom, lines * p.line + p.size * 0.6);
      } else {
        p.upright = true;
        p.tickRoom = Math.max(p.tickRoom, longest(panel.xNames, p.size) + 12);
      }
    }
  }

  /* Margins and the places of the panels; words that belong to no axis. */
  function place(layout, p) {
    const notes = layout.annotations || [];
    const titles = notes.filter((note) => note.name === "panel title");
    const marked = notes.some((note) => note.name === "x reference") ? p.line : 0;
    for (const note of notes) note.font = { ...note.font, size: p.size - 1 };
    for (const note of titles) {
      note.text = wrap(note.text, p.w + p.gapX - 8, p.size);
      note.font.size = p.size;
      note.yshift = marked;
    }
    const head = Math.max(0, ...titles.map((note) => lineCount(note.text))) * p.line + marked + 6;
    p.foot = wrap(p.xTitle, p.w, p.size);
    const gapY = head + 12, inner = p.rows * p.h + (p.rows - 1) * gapY;
    const bottom = p.tickRoom + lineCount(p.foot) * p.line + 6;
    layout.margin = { l: p.left, r: p.right, t: head + 4, b: bottom, pad: 0 };
    layout.height = Math.round(inner + head + 4 + bottom);
    p.panels.forEach((panel, k) => {
      panel.lowest = k + p.columns >= p.panels.length;
      panel.first = k % p.columns === 0;
      const start = ((k % p.columns) * (p.w + p.gapX)) / p.inside;
      const top = 1 - (Math.floor(k / p.columns) * (p.h + gapY)) / inner;
      panel.x.domain = [start, Math.min(start + p.w / p.inside, 1)];
      panel.y.domain = [Math.max(top - p.h / inner, 0), top];
    });
  }

  /* Titles and ticks of one panel's axes. */
  function label(panel, p) {
    const { x, y } = panel;
    const beside = (text) => wrap(text, p.h, p.size);
    if (p.grid) {
      x.showticklabels = panel.lowest;
      y.showticklabels = panel.first;
      x.title = { text: panel.lowest ? p.foot : "" };
      y.title = { text: panel.first ? beside(panel.yTitle) : "" };
    } else {
      x.title = { text: titleOf(x) && p.foot };
      y.title = { text: beside(titleOf(y)) };
    }
    for (const axis of [x, y]) {
      Object.assign(axis, { fixedrange: true, automargin: false });
      Object.assign(axis.title, { standoff: 8, font: { size: p.size } });
      if (axis.exponentformat === "power") axis.tickfont = { size: p.size * 0.85 }; // plotly enlarges powers
    }
    x.nticks = Math.max(3, Math.floor(p.w / (p.narrow ? 38 : 60)));
    if (panel.whole && x.range && x.type !== "log" && x.range[1] - x.range[0] <= x.nticks) x.dtick = 1;
    y.nticks = Math.max(3, Math.floor(p.h / 40));
    const fitting = p.upright ? p.w / (p.size * 1.25) : Infinity;
    if (panel.xNames) nameTicks(x, panel.xNames, p.upright ? panel.xNames : panel.xLabels, fitting, p.upright ? -90 : 0);
    if (panel.yNames) nameTicks(y, panel.yNames, panel.yLabels, p.h / (p.size * 1.2), 0);
  }

  /* Labels of categories: every k-th, so that they do not overlap. */
  function nameTicks(axis, names, labels, most, angle) {
    const every = Math.max(1, Math.ceil(names.length / Math.max(Math.floor(most), 1)));
    const kept = (values) => values.filter((_, k) => k % every === 0);
    Object.assign(axis, { tickmode: "array", tickvals: kept(names), ticktext: kept(labels), tickangle: angle });
  }

  /* Points shrink where they crowd; cells lose their gaps where they are small. */
  function crowd(data, p) {
    for (const trace of data) {
      if (!Array.isArray(trace.x)) continue;
      if (trace.marker && trace.marker.size)
        trace.marker.size = Math.min(6, Math.max(2.5, (0.45 * p.w) / trace.x.length));
      if (trace.type === "heatmap") {
        const cell = Math.min(p.w / trace.x.length, p.h / (trace.y || [0]).length);
        trace.xgap = trace.ygap = cell >= 9 ? 1 : 0;
      }
    }
  }

  /* Graphs of boxes keep their size in pixels: their parts follow one another as words do. */
  function flow(layout, parts, width) {
    const gap = 28;
    let left = 0, top = 0, height = 0;
    const corners = parts.map(([w, h]) => {
      if (left && left + w > width) [left, top] = [0, height + gap];
      const corner = [left, top];
      left += w + gap;
      height = Math.max(height, top + h);
      return corner;
    });
    parts.forEach(([w, h], k) => {
      const [x, y] = corners[k];
      layout[axisName("x", k)].domain = [x / width, Math.min((x + w) / width, 1)];
      layout[axisName("y", k)].domain = [Math.max(1 - (y + h) / height, 0), 1 - y / height];
    });
    return Object.assign(layout, { height, margin: { l: 0, r: 0, t: 0, b: 0 } });
  }

  /* The layout of a figure for a width in pixels, and at most so many of height for all of its panels as far as they
     can be read then. */
  function adapt(spec, width, most = Infinity) {
    const layout = structuredClone(spec.layout);
    theme(layout, spec.data);
    Object.assign(layout, { width, autosize: false, showlegend: false, sliders: [] });
    if (layout.coloraxis) layout.coloraxis.showscale = false;
    const eye = layout.scene && layout.scene.camera && layout.scene.camera.eye;
    if (eye && width < 560) for (const axis of "xyz") eye[axis] *= 1.3; // the titles of its axes need the room
    const meta = layout.meta && layout.meta.loopinterp;
    if (!meta) return layout;
    if (meta.parts) return flow(layout, meta.parts, width);
    const p = plan(spec, layout, meta, width, most);
    layout.font.size = p.size;
    planNames(p);
    place(layout, p);
    for (const panel of p.panels) label(panel, p);
    crowd(spec.data, p);
    return layout;
  }

  return { adapt };
})();
