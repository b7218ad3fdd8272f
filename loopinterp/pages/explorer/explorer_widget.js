
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
  const left = make("div"), right = make("div"), predicted = make("div");
  let handle = null, beside = [], turn = 0, part = () => {};
  const asked = controls(model, () => handle.state);
  const heading = (text) => make("h3", { className: "x-title" }, text);
  const other = make("div", { hidden: true }, heading("With a state put in"), right);
  const program = make("select"), choice = field("Program", program);
  const third = make("div", { hidden: true }, heading("What a program says of it"), choice, predicted);
  program.addEventListener("change", showChanged);
  el.append(asked.box, make("div", { className: "x-beside" }, make("div", {}, heading("As it is"), left), other, third));

  /* Each in an element of its own, so that one that comes too late is shown nowhere. */
  const stand = (where, payload) => mount(where.appendChild(make("div")), payload);

  async function showChanged() {
    const changed = model.get("changed"), mine = ++turn;
    const names = Object.keys(changed.predicted ?? {}), wanted = program.value;
    asked.show();
    part();
    part = () => {};
    for (const one of beside.splice(0)) one.destroy();
    right.replaceChildren();
    predicted.replaceChildren();
    other.hidden = !changed.examples;
    third.hidden = !names.length;
    program.replaceChildren(...names.map((name) => option(name, name)));
    if (names.includes(wanted)) program.value = wanted;
    if (!changed.examples || !handle) return;
    const said = changed.predicted[program.value];
    if (names.length && !said) predicted.append(make("p", { className: "x-note" }, `${program.value} makes no claim: a program says what follows from the state of another example alone.`));
    const made = await Promise.all([stand(right, changed), ...(said ? [stand(predicted, said)] : [])]);
    if (mine !== turn) return made.forEach((one) => one.destroy());
    beside = made;
    part = together([handle, ...made]);
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
    for (const one of [handle, ...beside]) one?.destroy();
  };
}

export default { render };
