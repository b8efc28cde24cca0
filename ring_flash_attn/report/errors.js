// Errors of each tensor on a log axis, with the limits that they had to keep.
"use strict";

const TENSORS = ["out", "lse", "dq", "dk", "dv", "dsink"];
const MEASURES = { max: "largest error", share: "largest error / limit", relative: "relative error" };

function drawErrors(rows) {
  const place = clear(host("errors"));
  const measure = document.getElementById("error-measure").value;
  const points = worstOfCases(rows, measure);
  if (!points.length) return say(place, "None of the chosen rows has errors: those come from rfa verify, bench and compare.");
  const shown = points.filter((point) => point.value !== null);
  const strange = points.length - shown.length;
  if (strange) place.append(element("p", { class: "warning" }, `${strange} errors are not finite, or have no such value, and cannot be drawn.`));
  if (!shown.length) return;
  place.append(legend(shown.map((point) => point.row.implementation)));
  const grid = place.appendChild(element("div", { class: "panels" }));
  for (const [title, found] of grouped(shown, (point) => `${point.row.dtype ?? "any dtype"} · ${point.row.device}`)) {
    drawErrorPanel(grid, title, found, measure);
  }
}

// One point for each tensor of each case: that of the rank with the largest error.
function worstOfCases(rows, measure) {
  const worst = new Map();
  for (const row of rows) {
    for (const [tensor, error] of Object.entries(row.row.errors || {})) {
      const key = `${row.case} ${tensor}`;
      const value = finite(measure === "share" ? error.max / error.limit : error[measure]);
      const found = { row, tensor, error, value, limit: limitOf(error, measure) };
      const before = worst.get(key);
      if (!before || value === null || (before.value !== null && value > before.value)) worst.set(key, found);
    }
  }
  return [...worst.values()];
}

function limitOf(error, measure) {
  if (measure === "relative") return null; // limits are those of the largest error
  return measure === "share" ? 1 : finite(error.limit);
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}

function drawErrorPanel(grid, title, points, measure) {
  const tensors = unique(points.map((point) => point.tensor))
    .sort((a, b) => (TENSORS.indexOf(a) + 1 || 99) - (TENSORS.indexOf(b) + 1 || 99));
  const names = unique(points.map((point) => point.row.implementation));
  const values = points.flatMap((point) => [point.value, point.limit]).filter((value) => value > 0);
  const zero = points.some((point) => point.value === 0);
  const smallest = values.length ? Math.min(...values) : 1;
  const floor = zero ? 10 ** (Math.floor(Math.log10(smallest)) - 1) : smallest; // where zeros are drawn
  const failed = points.filter((point) => point.error.passed === false).length;
  const place = placer(tensors, names);
  const traces = names.map((name) => errorTrace(name, points, place, floor));
  const limited = points.filter((point) => point.limit !== null);
  if (limited.length) traces.unshift(limitTrace(limited, place));
  const chart = element("div", { class: "chart", role: "img",
    "aria-label": `${title}: ${MEASURES[measure]} of ${points.length} tensors, ${failed} beyond their limit` });
  const zeros = zero ? ", hollow: exactly 0" : "";
  grid.append(element("figure", {},
    element("figcaption", {}, element("strong", {}, title),
      element("span", {}, `${points.length} marks${zeros}; ${failed ? `${failed} beyond their limit` : "none beyond its limit"}`)),
    chart));
  plot(chart, traces, {
    height: 340,
    xaxis: axis("", { tickvals: tensors.map((_, i) => i), ticktext: tensors.map(verbatim), range: [-0.5, tensors.length - 0.5], showgrid: false, zeroline: false }),
    yaxis: axis(MEASURES[measure], { type: "log", exponentformat: "power", dtick: 1, range: decades([...values, floor]) }),
  });
}

// Whole powers of ten around some values, for a log axis.
function decades(values) {
  const powers = values.map((value) => Math.log10(value));
  return [Math.floor(Math.min(...powers)) - 0.3, Math.ceil(Math.max(...powers)) + 0.2];
}

// Where a mark stands: implementations side by side, cases spread evenly within.
function placer(tensors, names) {
  const width = 0.8 / names.length;
  return (point) => {
    const spreadOut = ((point.row.case * 0.618034) % 1) - 0.5;
    const middle = (names.indexOf(point.row.implementation) + 0.5) * width - 0.4;
    return tensors.indexOf(point.tensor) + middle + spreadOut * width * 0.85;
  };
}

function errorTrace(name, points, place, floor) {
  const own = points.filter((point) => point.row.implementation === name);
  const { colour, symbol } = style(name);
  const failed = own.map((point) => point.error.passed === false);
  return {
    type: "scatter", mode: "markers", name: verbatim(name),
    x: own.map(place), y: own.map((point) => point.value || floor),
    text: own.map(errorHover), hoverinfo: "text",
    marker: {
      color: colour, opacity: 0.75, line: { width: 0 }, size: failed.map((bad) => (bad ? 11 : 6)),
      symbol: own.map((point, i) => (failed[i] ? "x" : point.value ? symbol : `${symbol}-open`)),
    },
  };
}

function errorHover(point) {
  const { row, error, tensor } = point;
  const limit = error.limit === undefined ? "" : `<br>limit ${brief(error.limit)}`;
  const verdict = error.passed === false ? "<br><b>beyond its limit</b>" : "";
  const what = [row.placement, row.feature, row.passes].filter(Boolean).map(verbatim).join(", ");
  return `<b>${verbatim(tensor)}</b> · ${verbatim(row.implementation)}<br>${what}<br>${verbatim(row.shape)}`
    + `<br>largest ${brief(error.max)}, relative ${brief(error.relative)}${limit}${verdict}`;
}

function limitTrace(points, place) {
  return {
    type: "scatter", mode: "markers", name: "limit", hoverinfo: "skip",
    x: points.map(place), y: points.map((point) => point.limit),
    marker: { symbol: "line-ew", size: 7, line: { width: 1.2, color: theme("limit") } },
  };
}
