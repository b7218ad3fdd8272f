// Shows every exploration of the page in the element before its data; one that is alone plays, and has links to its states.
const shown = [...document.querySelectorAll(".exploration-json")];
const alone = shown.length === 1;
window.explored = Promise.allSettled(
  shown.map((data) => mount(data.previousElementSibling, JSON.parse(data.textContent), { linked: alone, play: alone }))
).then((made) => together(made.filter((one) => one.value).map((one) => one.value)));
