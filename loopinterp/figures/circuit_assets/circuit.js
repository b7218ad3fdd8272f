"use strict";
/* The circuit graph: choose a node, see its edges, its facts and its words in the program. */
var circuitGraph = (() => {
  /* A text in pieces: [text, name], where name is one of the names, or "" between them. */
  function pieces(text, names) {
    const known = [...names].filter((name) => /\w/.test(name)).sort((a, b) => b.length - a.length);
    if (!known.length) return [[text, ""]];
    const escaped = known.map((name) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const found = new RegExp(`(?<![\\w.])(?:${escaped.join("|")})(?![\\w.])`, "g");
    const out = [];
    let at = 0;
    for (const match of text.matchAll(found)) {
      if (match.index > at) out.push([text.slice(at, match.index), ""]);
      out.push([match[0], match[0]]);
      at = match.index + match[0].length;
    }
    if (at < text.length) out.push([text.slice(at), ""]);
    return out;
  }

  /* What a node reads and what reads it, by label, with the measured effect where there is one. */
  function neighbours(graph, id) {
    const label = Object.fromEntries(graph.nodes.map((node) => [node.id, node.label]));
    const words = (edge, end) => {
      const loops = ["", ", next loop", ", later loops"][edge.lag];
      const role = edge.role ? ` as ${edge.role}` : "";
      const effect = edge.effect === null ? "" : ` (effect ${edge.effect.toFixed(3)})`;
      return `${label[edge[end]]}${role}${loops}${effect}`;
    };
    return {
      reads: graph.edges.filter((edge) => edge.target === id).map((edge) => words(edge, "source")),
      readBy: graph.edges.filter((edge) => edge.source === id).map((edge) => words(edge, "target")),
    };
  }

  /* The nearest place in the direction of an arrow key; the same one where there is none. */
  function next(places, current, key) {
    const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
    let best = current, least = Infinity;
    const from = places[current];
    places.forEach((to, k) => {
      const along = (to.x - from.x) * dx + (to.y - from.y) * dy;
      const aside = Math.abs((to.x - from.x) * dy) + Math.abs((to.y - from.y) * dx);
      if (k === current || along < 1) return;
      const cost = along + 2.5 * aside;
      if (cost < least) [best, least] = [k, cost];
    });
    return best;
  }

  const make = (tag, text, ...children) => {
    const node = document.createElement(tag);
    if (text) node.textContent = text; // never as markup: names come from elsewhere
    node.append(...children);
    return node;
  };

  /* A drawing as a file of its own: its words, its shapes, and the style of this page. */
  function image(svg) {
    const copy = svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    const sheets = [...document.querySelectorAll("style")].map((sheet) => sheet.textContent);
    copy.prepend(make("style", sheets.filter((text) => text.includes(".circuit-svg")).join("\n")));
    return new XMLSerializer().serializeToString(copy);
  }

  function start(root) {
    const graph = JSON.parse(root.querySelector(".circuit-json").textContent);
    const byId = Object.fromEntries(graph.nodes.map((node) => [node.id, node]));
    const drawings = [...root.querySelectorAll(".circuit-svg")];
    const facts = root.querySelector(".circuit-facts"), code = root.querySelector(".circuit-code code");
    const ask = facts.textContent;
    const names = new Set(graph.nodes.flatMap((node) => node.names));

    if (code) {
      code.replaceChildren(...pieces(code.textContent, names).map(([text, name]) => (name ? nameInCode(text, name) : text)));
      roving([...code.children], (k, key) => k + ({ ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 })[key]);
    }

    /* A name in the program is a button that chooses the node it is about: the one called by it first of all. */
    function nameInCode(text, name) {
      const rank = (one) => (one.names[0] === name ? 1 + (one.kind === "variable") : 0);
      const named = graph.nodes.filter((one) => one.names.includes(name));
      const { id, kind } = named.reduce((best, one) => (rank(one) > rank(best) ? one : best));
      const part = make("span", text);
      Object.assign(part.dataset, { name, chooses: id });
      for (const [attribute, value] of Object.entries({ role: "button", "aria-pressed": "false", "aria-label": `${name}, ${kind}` })) part.setAttribute(attribute, value);
      part.addEventListener("click", () => choose(part.getAttribute("aria-pressed") === "true" ? null : id));
      return part;
    }

    /* Buttons that are one stop for the tab key, with arrows from one to the next: `to` says which. */
    function roving(buttons, to) {
      buttons.forEach((button, k) => {
        button.setAttribute("tabindex", k ? "-1" : "0");
        button.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") button.dispatchEvent(new MouseEvent("click", { bubbles: true }));
          else if (event.key === "Escape") choose(null);
          else if (event.key.startsWith("Arrow")) {
            const other = buttons[to(k, event.key)] ?? button;
            button.setAttribute("tabindex", "-1");
            other.setAttribute("tabindex", "0");
            other.focus();
          } else return;
          event.preventDefault();
          event.stopPropagation();
        });
      });
    }

    function choose(id, key = "") {
      const node = id === null ? null : byId[id];
      for (const svg of drawings) {
        svg.classList.toggle("chosen", id !== null);
        const here = new Set(key && svg.querySelector(`[data-key="${CSS.escape(key)}"]`) ? [key] : []);
        const own = (part) => part.dataset.node === id && (!here.size || here.has(part.dataset.key));
        const near = new Set();
        const mine = [...svg.querySelectorAll(".node")].filter(own).map((part) => part.dataset.key);
        for (const edge of svg.querySelectorAll(".edge")) {
          const is = mine.includes(edge.dataset.source) || mine.includes(edge.dataset.target);
          edge.classList.toggle("near", is);
          if (is) near.add(edge.dataset.source).add(edge.dataset.target);
        }
        const nearIds = new Set();
        for (const part of svg.querySelectorAll(".node")) {
          const is = own(part);
          part.setAttribute("aria-pressed", String(is));
          part.classList.toggle("near", is || near.has(part.dataset.key));
          if (is || near.has(part.dataset.key)) nearIds.add(part.dataset.node);
        }
        for (const part of svg.querySelectorAll(".row-label")) part.classList.toggle("near", nearIds.has(part.dataset.node));
        for (const part of svg.querySelectorAll(".rail")) part.classList.toggle("near", part.dataset.node === id);
      }
      const words = new Set(node ? node.names : []);
      for (const part of root.querySelectorAll(".circuit-code [data-name]")) {
        part.classList.toggle("near", words.has(part.dataset.name));
        part.setAttribute("aria-pressed", String(part.dataset.chooses === id));
      }
      root.dataset.chosen = id || "";
      tell(id, node);
    }

    function tell(id, node) {
      if (id === null) return facts.replaceChildren(make("p", ask));
      const list = make("dl");
      const row = (head, ...texts) => texts.length && list.append(make("div", "", make("dt", head), ...texts.map((text) => make("dd", text))));
      if (node && node.note) row("Where", node.note);
      for (const [head, text] of node ? node.facts : []) row(head, text);
      const { reads, readBy } = node ? neighbours(graph, id) : { reads: [], readBy: [] };
      row("Reads", ...reads);
      row("Is read by", ...readBy);
      if (!node) row("Parts", ...graph.nodes.filter((one) => one.section === id).map((one) => one.label));
      facts.replaceChildren(Object.assign(make("p", node ? node.label : id), { className: "circuit-name" }), list);
    }

    for (const svg of drawings) {
      const nodes = [...svg.querySelectorAll(".node")];
      const centre = (node) => {
        const box = node.querySelector(".box");
        const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)));
        return { x: x + width / 2, y: y + height / 2 };
      };
      const places = nodes.map(centre);
      for (const node of nodes)
        node.addEventListener("click", () => {
          const again = node.getAttribute("aria-pressed") === "true";
          choose(again ? null : node.dataset.node, node.dataset.loop === undefined ? "" : node.dataset.key);
        });
      roving(nodes, (k, key) => next(places, k, key));
      for (const label of svg.querySelectorAll(".row-label")) label.addEventListener("click", () => choose(label.dataset.node));
    }

    function save(text, type, ending) {
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([text], { type }));
      link.download = `${graph.title.replace(/[^\w]+/g, "-")}${ending}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }
    root.querySelector(".circuit-image").addEventListener("click", () => {
      const shown = drawings.find((svg) => svg.getBoundingClientRect().width > 0);
      save(image(shown), "image/svg+xml", `-${root.dataset.view}.svg`);
    });
    root.querySelector(".circuit-data").addEventListener("click", () => save(JSON.stringify(graph, null, 1), "application/json", ".json"));

    for (const button of root.querySelectorAll(".circuit-views button")) {
      button.addEventListener("click", () => {
        root.dataset.view = button.dataset.view;
        for (const other of root.querySelectorAll(".circuit-views button")) other.setAttribute("aria-pressed", String(other === button));
      });
    }
    root.dataset.ready = "true";
  }

  return { pieces, neighbours, next, start };
})();
if (typeof document !== "undefined") {
  for (const root of document.querySelectorAll(".circuit:not([data-ready])")) circuitGraph.start(root);
}
if (typeof module !== "undefined") module.exports = circuitGraph;
