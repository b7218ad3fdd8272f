"use strict";
/* Lays a figure out for the width it has: panels in fewer columns, fewer ticks, wrapped words.
   Figures made by loopinterp.plotting say how many panels they have in layout.meta. */
const figureLayout = (() => {
  const wrap = (text, most) => {
    const lines = [];
    for (const word of String(text).split(" ")) {
      const last = lines.length - 1;
      if (last >= 0 && (lines[last] + " " + word).length <= most) lines[last] += " " + word;
      else lines.push(word);
    }
    return lines.join("<br>");
  };
  const lineCount = (text) => (text ? text.split("<br>").length : 0);
  const axisName = (letter, panel) => letter + "axis" + (panel ? panel + 1 : "");
  const axisRef = (letter, panel) => letter + (panel ? panel + 1 : "");
  const isNamed = (values) => Array.isArray(values) && values.some((v) => typeof v === "string" && isNaN(v));
  const canvas = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.documentElement).getPropertyValue("--font");

  /* Width in pixels of the longest line of some texts. */
  function longest(texts, size) {
    canvas.font = `${size}px ${family}`;
    const lines = texts.flatMap((text) => String(text).split("<br>"));
    return Math.max(0, ...lines.map((line) => canvas.measureText(line).width));
  }

  /* Names along an axis that holds categories, or null. */
  function names(data, letter, panel) {
    const found = [];
    for (const trace of data) {
      if ((trace[letter + "axis"] || letter) === axisRef(letter, panel) && isNamed(trace[letter]))
        for (const name of trace[letter]) if (!found.includes(name)) found.push(name);
    }
    return found.length ? found : null;
  }

  function theme(layout, data) {
    const probe = document.createElement("span");
    document.body.append(probe);
    const colour = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const text = colour("--text"), surface = colour("--surface"), line = colour("--line");
    probe.remove();
    layout.font = { ...layout.font, family, color: text };
    layout.hoverlabel = { bgcolor: surface, bordercolor: line, font: { color: text, size: 13 }, align: "left" };
    for (const trace of data)
      for (const bars of [trace.error_x, trace.error_y]) if (bars) bars.color = text;
  }

  function adapt(spec, width) {
    const layout = structuredClone(spec.layout);
    const narrow = width < 560;
    const size = narrow ? 12 : 14;
    const letter = longest(["average letters"], size) / 15;
    const line = size * 1.3;
    theme(layout, spec.data);
    Object.assign(layout, { width, autosize: false, showlegend: false, sliders: [] });
    layout.font.size = size;
    if (layout.coloraxis) layout.coloraxis.showscale = false;
    const meta = layout.meta && layout.meta.loopinterp;
    if (!meta) return layout;

    const grid = meta.columns > 1 || meta.square;
    const count = meta.panels;
    const panels = [...Array(count).keys()];
    const x = (k) => layout[axisName("x", k)], y = (k) => layout[axisName("y", k)];
    const notes = layout.annotations || [];
    const titles = notes.filter((note) => note.name === "panel title");
    const words = (axis) => (axis.title && axis.title.text) || "";
    const xTitle = panels.map((k) => words(x(k))).find(Boolean) || "";
    const yTitle = panels.map((k) => words(y(k))).find(Boolean) || "";

    // Left edge: the tick labels, and the title beside them.
    const yNames = panels.map((k) => names(spec.data, "y", k));
    const room = narrow ? 15 : 34;
    const shownNames = yNames.map((list) => list && list.map((name) => wrap(name, room)));
    const widest = Math.max(...shownNames.map((list) => longest(list || [y(0).type === "log" ? "0.000" : "0.25"], size)));
    const left = Math.ceil(widest + 12 + (yTitle ? size * 1.9 : 0));
    const right = 14;

    // Columns: as many as leave every panel a readable width.
    const gapX = grid ? 22 : 0;
    const least = meta.square ? (narrow ? 96 : 150) : 220;
    const inside = width - left - right;
    let columns = Math.min(meta.columns, count);
    const share = () => (inside - gapX * (columns - 1)) / columns;
    while (columns > 1 && share() < least) columns = columns > 2 ? Math.ceil(columns / 2) : 1;
    const rows = Math.ceil(count / columns);
    const w = meta.square ? Math.min(share(), 460) : share();
    let h = meta.panel_height;
    if (meta.square) h = w;
    else if (narrow && shownNames.every((list) => !list)) h = Math.min(h, 250);

    // Below and between: tick labels turn upright where names do not fit side by side.
    const xNames = panels.map((k) => names(spec.data, "x", k));
    const crowded = xNames.some((list) => list && list.length * (longest(list, size) + 10) > w);
    const tickRoom = crowded ? longest(xNames.flat().filter(Boolean), size) + 12 : size * 1.9;
    for (const note of titles) note.text = wrap(note.text, Math.max(Math.floor(w / letter) + 6, 12));
    const marked = notes.some((note) => note.name === "x reference") ? line : 0;
    for (const note of titles) note.yshift = marked;
    const headRoom = Math.max(0, ...titles.map((note) => lineCount(note.text))) * line + marked + 6;
    const gapY = headRoom + 12;
    const foot = wrap(xTitle, Math.max(Math.floor(w / letter), 12));
    const bottom = tickRoom + lineCount(foot) * line + 6;
    const top = headRoom + 4;
    const inner = rows * h + (rows - 1) * gapY;
    layout.height = Math.round(inner + top + bottom);
    layout.margin = { l: left, r: right, t: top, b: bottom, pad: 0 };

    for (const k of panels) {
      const row = Math.floor(k / columns), column = k % columns;
      const start = (column * (w + gapX)) / inside;
      const over = 1 - (row * (h + gapY)) / inner;
      const lowest = k + columns >= count;
      const xAxis = x(k), yAxis = y(k);
      xAxis.domain = [start, Math.min(start + w / inside, 1)];
      yAxis.domain = [Math.max(over - h / inner, 0), over];
      for (const axis of [xAxis, yAxis]) Object.assign(axis, { fixedrange: true, automargin: false });
      if (grid) {
        xAxis.showticklabels = lowest;
        yAxis.showticklabels = column === 0;
        xAxis.title = { text: lowest ? foot : "" };
        yAxis.title = { text: column === 0 ? wrap(yTitle, Math.max(Math.floor(h / letter), 12)) : "" };
      } else {
        if (words(xAxis)) xAxis.title = { text: foot };
        if (words(yAxis)) yAxis.title = { text: wrap(words(yAxis), Math.max(Math.floor(h / letter), 12)) };
      }
      for (const axis of [xAxis, yAxis]) axis.title = { ...axis.title, standoff: 8, font: { size } };
      for (const axis of [xAxis, yAxis])
        if (axis.exponentformat === "power") axis.tickfont = { size: size * 0.85 }; // plotly enlarges powers
      xAxis.nticks = Math.max(3, Math.floor(w / (narrow ? 38 : 60)));
      yAxis.nticks = Math.max(3, Math.floor(h / 40));
      if (xNames[k]) thin(xAxis, xNames[k], crowded ? w / (size * 1.25) : xNames[k].length, crowded ? -90 : 0);
      if (yNames[k]) thin(yAxis, shownNames[k], Math.max(h / (size * 1.2), 2), 0, yNames[k]);
    }
    // Points shrink where they crowd.
    for (const trace of spec.data)
      if (trace.marker && trace.marker.size && Array.isArray(trace.x))
        trace.marker.size = Math.min(6, Math.max(2.5, (0.45 * w) / trace.x.length));
    for (const note of notes) {
      note.font = { ...note.font, size: note.name === "panel title" ? size : size - 1 };
    }
    return layout;
  }

  /* Category labels: every k-th, so that they do not overlap. */
  function thin(axis, labels, most, angle, values) {
    const every = Math.max(1, Math.ceil(labels.length / Math.max(Math.floor(most), 1)));
    const keep = labels.map((_, k) => k).filter((k) => k % every === 0);
    axis.tickmode = "array";
    axis.tickvals = keep.map((k) => (values || labels)[k]);
    axis.ticktext = keep.map((k) => labels[k]);
    axis.tickangle = angle;
  }

  return { adapt };
})();
