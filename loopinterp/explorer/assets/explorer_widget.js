
/* What a notebook adds: examples that are typed, and states put in, asked of the model behind the page. */

const field = (text, node) => make("label", { className: "x-select" }, `${text} `, node);

function controls(model, chosen) {
  const text = make("input", { type: "text", className: "x-text", placeholder: "13 + 9" });
  const typed = make("form", { className: "x-bar" }, field("Example", text), make("button", {}, "Show"));
  typed.addEventListener("submit", (event) => {
    event.preventDefault();
    model.send({ kind: "type", text: text.value });
  });
  const value = make("select");
  const put = make("button", { type: "button" }, "Put in here");
  const back = make("button", { type: "button" }, "Take out");
  put.addEventListener("click", () => {
    const { example, loop, pos } = chosen();
    const [kind, source] = value.value.split(" ");
    model.send({ kind: "put in", value: kind, source: Number(source || 0), example, loop, pos });
  });
  back.addEventListener("click", () => model.send({ kind: "back" }));
  const said = make("p", { className: "x-said", aria: { role: "alert" } });
  const fill = () => {
    const others = model.get("payload").examples.map((_, k) => option(`interchange ${k}`, `the state of example ${k + 1}`));
    value.replaceChildren(...(others.length > 1 ? [...others, option("mean", "the mean of the examples")] : []), option("zero", "zeros"));
    if (others.length > 1) value.value = "interchange 1";
  };
  const show = () => {
    said.textContent = model.get("said");
    back.disabled = !model.get("changed").examples;
  };
  fill();
  show();
  const box = make("div", { className: "x-asked" }, typed, make("div", { className: "x-bar" }, field("At the chosen place", value), put, back), said);
  return { box, fill, show };
}

async function render({ model, el }) {
  const [left, right] = [make("div"), make("div")];
  let handle = null, beside = null, turn = 0, part = () => {};
  const asked = controls(model, () => handle.state);
  const heading = (text) => make("h4", { className: "x-title" }, text);
  const other = make("div", { hidden: true }, heading("With a state put in"), right);
  el.append(asked.box, make("div", { className: "x-beside" }, make("div", {}, heading("As it is"), left), other));

  async function showChanged() {
    const changed = model.get("changed"), mine = ++turn;
    asked.show();
    part();
    beside?.destroy();
    beside = null;
    other.hidden = !changed.examples;
    if (!changed.examples || !handle) return;
    const made = await mount(right, changed);
    if (mine !== turn) return;
    beside = made;
    part = together([handle, beside]);
  }
  async function showPayload() {
    handle?.destroy();
    handle = await mount(left, model.get("payload"));
    asked.fill();
    await showChanged();
  }
  model.on("change:payload", showPayload);
  model.on("change:changed", showChanged);
  model.on("change:said", asked.show);
  await showPayload();
  return () => {
    handle?.destroy();
    beside?.destroy();
  };
}

export default { render };
