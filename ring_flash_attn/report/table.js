// The table of all rows: searched, sorted by any column, and downloaded as CSV or JSON.
"use strict";

const COLUMNS = [
  ["kind", "kind"], ["implementation", "implementation"], ["passes", "pass"], ["shape", "shape"],
  ["batch", "batch"], ["seqlen", "seqlen"], ["ms", "ms"], ["tflops", "TFLOP/s"], ["roof", "roofline"],
  ["efficiency", "efficiency %"], ["error_share", "error / limit"], ["failed", "failed"],
  ["world_size", "ranks"], ["rank", "rank"], ["placement", "placement"], ["link", "link"], ["feature", "feature"],
  ["peak_mib", "peak MiB"], ["runs", "runs"], ["device", "device"], ["file", "file"],
];
const PAGE = 100; // rows at once
const table = { rows: [], found: [], sort: null, down: false, shown: PAGE };

function drawTable(rows) {
  table.rows = rows;
  table.shown = PAGE;
  refresh();
}

function refresh() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  table.found = table.rows.filter((row) => {
    const text = COLUMNS.map(([name]) => row[name] ?? "").join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (table.sort) table.found.sort(compareRows);
  document.getElementById("count").textContent = `${table.found.length} of ${data.records.length} rows`;
  showRows();
}

// Empty cells come last in both directions.
function compareRows(a, b) {
  const [x, y] = [a[table.sort], b[table.sort]];
  if (x === null || y === null) return (x === null) - (y === null);
  const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
  return table.down ? -order : order;
}

function showRows() {
  const place = clear(host("rows"));
  if (!table.found.length) return say(place, "No row has all of this.");
  const columns = COLUMNS.filter(([name]) => table.rows.some((row) => row[name] !== null && row[name] !== ""));
  const head = element("tr", {}, ...columns.map(headCell));
  const body = table.found.slice(0, table.shown).map((row) =>
    element("tr", {}, ...columns.map(([name]) =>
      element("td", { class: typeof row[name] === "number" ? "number" : null }, brief(row[name])))));
  place.append(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  if (table.found.length > table.shown) {
    const more = () => { table.shown += 10 * PAGE; showRows(); };
    place.append(element("button", { type: "button", class: "more", onclick: more },
      `Show more (${table.shown} of ${table.found.length} rows now)`));
  }
}

function headCell([name, label]) {
  const sorted = table.sort === name;
  const sort = () => {
    table.down = sorted && !table.down;
    table.sort = name;
    refresh();
    host("rows").querySelector(`button[data-column="${name}"]`).focus();
  };
  const mark = sorted ? (table.down ? " ▼" : " ▲") : "";
  return element("th", { scope: "col", "aria-sort": sorted ? (table.down ? "descending" : "ascending") : "none" },
    element("button", { type: "button", "data-column": name, onclick: sort }, label + mark));
}

function asCsv(rows) {
  const lines = [COLUMNS.map(([, label]) => label), ...rows.map((row) => COLUMNS.map(([name]) => row[name]))];
  return lines.map((line) => line.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

// Texts that a spreadsheet would take for a formula get an apostrophe.
function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function asJson(rows) {
  return JSON.stringify(rows.map((row) => ({ file: row.file, device: row.device, ...row.row })), null, 1) + "\n";
}

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

document.getElementById("search").addEventListener("input", () => { table.shown = PAGE; refresh(); });
document.getElementById("csv").addEventListener("click", () => download("rows.csv", "text/csv", asCsv(table.found)));
document.getElementById("json").addEventListener("click",
  () => download("rows.json", "application/json", asJson(table.found)));
