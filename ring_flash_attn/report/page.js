// The page: its header, the filters, and what is drawn again when one of them changes.
"use strict";

const FILTERS = { implementation: "Implementation", shape: "Shape", device: "Device", passes: "Pass", kind: "Kind" };
const everything = [...data.records, ...data.timelines];
const chosen = Object.fromEntries(Object.keys(FILTERS).map((field) => [field, new Set(choices(field))]));

function choices(field) {
  return unique(everything.map((each) => each[field]).filter((value) => value !== undefined));
}

function drawSources() {
  const named = (values) => Object.entries(values).map(([name, value]) => `${name} ${brief(value)}`).join(", ") || "–";
  const head = ["File", "Device", "Command", "Commit", "Date", "Rows", "Measured peak", "Settings", "Versions"];
  const lines = data.sources.map((each) => [
    each.file, each.device, element("code", {}, each.command), each.commit || "–", each.created.slice(0, 10) || "–",
    each.rows, named(each.peak), named(each.settings), named(each.versions),
  ]);
  host("sources").append(element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...lines.map((line) => element("tr", {}, ...line.map((cell) => element("td", {}, cell)))))));
}

function drawFilters() {
  const form = document.getElementById("filters");
  for (const [field, label] of Object.entries(FILTERS)) form.append(filter(field, label));
  form.append(element("button", { type: "button", id: "reset", onclick: reset }, "Reset"));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => event.key === "Escape" && closeFilters());
  document.addEventListener("click", (event) => form.contains(event.target) || closeFilters());
}

function filter(field, label) {
  const boxes = choices(field).map((value) => {
    const box = element("input", { type: "checkbox", checked: true, value });
    box.addEventListener("change", () => { chosen[field][box.checked ? "add" : "delete"](value); changed(); });
    const swatch = field === "implementation"
      ? [element("span", { class: "swatch", style: `background:${style(value).colour}` })] : [];
    return element("label", {}, box, ...swatch, element("span", {}, value));
  });
  const set = (on) => () => {
    chosen[field] = new Set(on ? choices(field) : []);
    changed();
  };
  return element("details", { "data-field": field, name: "filter" },
    element("summary", {}, label, element("span", { class: "quiet" })),
    element("fieldset", {}, element("legend", { class: "hidden" }, label),
      element("div", { class: "all" },
        element("button", { type: "button", onclick: set(true) }, "All"),
        element("button", { type: "button", onclick: set(false) }, "None")),
      ...boxes));
}

function reset() {
  for (const field of Object.keys(FILTERS)) chosen[field] = new Set(choices(field));
  changed();
}

function closeFilters() {
  document.querySelectorAll("#filters details[open]").forEach((each) => { each.open = false; });
}

function changed() {
  for (const details of document.querySelectorAll("#filters details")) {
    const field = details.dataset.field;
    const [count, all] = [chosen[field].size, choices(field).length];
    details.querySelector("summary span").textContent = count === all ? `all ${all}` : `${count} of ${all}`;
    details.classList.toggle("active", count < all);
    details.querySelectorAll("input").forEach((box) => { box.checked = chosen[field].has(box.value); });
  }
  render();
}

function render() {
  const rows = data.records.filter((row) => Object.keys(FILTERS).every((field) => chosen[field].has(row[field])));
  drawPanels(rows, THROUGHPUT);
  drawPanels(rows, EFFICIENCY);
  drawErrors(rows);
  drawTimelines(chosen);
  drawTable(rows);
}

drawSources();
drawFilters();
changed();
startScenes();
document.getElementById("error-measure").addEventListener("change", render);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
