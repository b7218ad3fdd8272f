// Shows every exploration of the page in the element before its data.
const shown = [...document.querySelectorAll(".exploration-json")];
window.explored = Promise.allSettled(
  shown.map((data) => mount(data.previousElementSibling, JSON.parse(data.textContent)))
).then((made) => together(made.filter((one) => one.value).map((one) => one.value)));
