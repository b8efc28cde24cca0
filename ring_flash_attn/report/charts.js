// Panels of lines or bars: throughput against sequence length, efficiency against world size.
"use strict";

const PANELS = 12; // shown at once, until asked for more
const BAR = 34; // px for a bar and its label
const PASSES = ["forward", "backward", "both"];
const PASS_NAMES = { forward: "Forward", backward: "Backward", both: "Forward and backward" };
const showAll = new Set(); // sections in which all panels are wanted

function isSlowest(row) {
  return row.slowest === null || row.slowest === 1;
}

const THROUGHPUT = {
  section: "throughput",
  nothing: "None of the chosen rows has a throughput.",
  takes: (row) => row.tflops !== null && row.seqlen !== null && isSlowest(row),
  panel: (row) => [row.shape, spread(row)],
  x: (row) => row.seqlen,
  y: (row) => row.tflops,
  xTitle: "sequence length",
  unit: "TFLOP/s",
  tick: tokens,
  roof: (row) => row.roof,
};

const EFFICIENCY = {
  section: "efficiency",
  nothing: "None of the chosen rows has an efficiency: those come from rfa replay and from runs on several ranks.",
  takes: (row) => row.efficiency !== null && row.world_size !== null && isSlowest(row),
  panel: (row) => [row.shape, `${row.seqlen} tokens a rank, batch ${row.batch}${onLink(row)}`],
  x: (row) => row.world_size,
  y: (row) => row.efficiency,
  xTitle: "ranks",
  unit: "%",
  tick: String,
  roof: () => 100,
};

function onLink(row) {
  return row.link && row.link !== "none" ? `, ${row.link}` : "";
}

function spread(row) {
  return row.world_size === null ? "one device" : `${row.world_size} ranks${onLink(row)}`;
}

function drawPanels(rows, spec) {
  const place = clear(host(spec.section));
  const taken = rows.filter(spec.takes);
  if (!taken.length) return say(place, spec.nothing);
  const key = (row) => JSON.stringify([row.passes, row.device, ...spec.panel(row), row.kind === "replay"]);
  const devices = unique(taken.map((row) => row.device));
  const order = (rows) => placeOf(rows[0], devices);
  const panels = [...grouped(taken, key).values()].sort((a, b) => order(a) - order(b));
  const shown = showAll.has(spec.section) ? panels : panels.slice(0, PANELS);
  place.append(legend(shown.flat().map((row) => row.implementation)));
  const grid = place.appendChild(element("div", { class: "panels" }));
  shown.forEach((each) => drawPanel(grid, each, spec));
  if (shown.length < panels.length) place.append(moreButton(panels.length, spec));
}

// One device before several, then by device, forward before backward.
function placeOf(row, devices) {
  return ((row.world_size === null ? 0 : 1) * devices.length + devices.indexOf(row.device)) * 10
    + PASSES.indexOf(row.passes);
}

function moreButton(count, spec) {
  const more = () => { showAll.add(spec.section); render(); };
  return element("button", { type: "button", class: "more", onclick: more },
    `Show all ${count} charts (now: the first ${PANELS})`);
}

function drawPanel(grid, rows, spec) {
  const [shape, where] = spec.panel(rows[0]);
  const replayed = rows[0].kind === "replay" ? ", replayed" : "";
  const title = `${PASS_NAMES[rows[0].passes] || rows[0].passes} · ${shape}`;
  const xs = unique(rows.map(spec.x)).sort(byNumber);
  const single = xs.length === 1;
  const at = single && spec.section === "throughput" ? ` · ${xs[0]} tokens` : single ? ` · ${xs[0]} ranks` : "";
  const chart = element("div", { class: "chart", role: "img", "aria-label": described(title, rows, spec) });
  grid.append(element("figure", {},
    element("figcaption", {}, element("strong", {}, title),
      element("span", {}, `${rows[0].device} · ${where}${replayed}${at}`)), chart));
  const lines = seriesOf(rows, spec);
  if (single) drawBars(chart, lines, spec);
  else drawLines(chart, lines, xs, spec);
}

function described(title, rows, spec) {
  const best = rows.reduce((a, b) => (spec.y(b) > spec.y(a) ? b : a));
  return `${title}: ${rows.length} values, the highest ${brief(spec.y(best))} ${spec.unit} by ${best.implementation}`;
}

// Rows that belong on one line.
function seriesOf(rows, spec) {
  const label = (row) => [row.implementation, row.placement].filter(Boolean).join(" · ");
  return [...grouped(rows, label)].flatMap(([name, found]) => apart(name, found, spec, [...APART]));
}

// If two rows of a line have the same x, the first of these in which they differ tells them apart.
const APART = [(row) => `batch ${row.batch}`, (row) => row.file, (row) => row.kind, (row) => `rank ${row.rank}`];

function apart(label, rows, spec, parts) {
  const clash = unique(rows.map(spec.x)).length < rows.length;
  if (clash && parts.length) {
    const groups = grouped(rows, parts.shift());
    if (groups.size === 1) return apart(label, rows, spec, parts);
    return [...groups].flatMap(([name, found]) => apart(`${label} · ${name}`, found, spec, [...parts]));
  }
  const sorted = rows.sort((a, b) => spec.x(a) - spec.x(b));
  return [{ label, rows: sorted, ...style(sorted[0].implementation) }];
}

function hover(row, line, spec) {
  const times = row.ms === null ? "" : `<br>${brief(row.ms)} ms, ${row.runs} runs`;
  return `${verbatim(line.label)}<br><b>${brief(spec.y(row))} ${spec.unit}</b>`
    + `<br>${spec.xTitle} ${spec.x(row)}${times}<br>${verbatim(row.file)}`;
}

const DASHES = ["solid", "dot", "dash", "longdash", "dashdot"];

function drawLines(chart, lines, xs, spec) {
  const seen = new Map(); // lines of one implementation differ in their dashes
  const traces = lines.map((line) => {
    const name = line.rows[0].implementation;
    seen.set(name, (seen.get(name) ?? -1) + 1);
    return {
      type: "scatter", mode: "lines+markers", name: verbatim(line.label),
      x: line.rows.map(spec.x), y: line.rows.map(spec.y),
      text: line.rows.map((row) => hover(row, line, spec)), hoverinfo: "text",
      line: { color: line.colour, width: 2, dash: DASHES[seen.get(name) % DASHES.length] },
      marker: { color: line.colour, symbol: line.symbol, size: 8 },
    };
  });
  const roof = roofOf(lines.flatMap((line) => line.rows), spec);
  if (roof.length) traces.push({
    type: "scatter", mode: "lines", name: "limit", x: roof.map((each) => each[0]), y: roof.map((each) => each[1]),
    text: roof.map((each) => `limit ${brief(each[1])} ${spec.unit}`), hoverinfo: "text",
    line: { color: theme("quiet"), width: 1.5, dash: "dash" },
  });
  plot(chart, traces, {
    height: 320,
    xaxis: axis(spec.xTitle, { type: "log", tickvals: xs, ticktext: xs.map(spec.tick) }),
    yaxis: axis(spec.unit, { rangemode: "tozero" }),
  });
}

function roofOf(rows, spec) {
  const points = new Map(rows.filter((row) => spec.roof(row) !== null).map((row) => [spec.x(row), spec.roof(row)]));
  return [...points].sort((a, b) => a[0] - b[0]);
}

// A single x: bars, the longest on top, each under its label.
function drawBars(chart, lines, spec) {
  const bars = lines.flatMap((line) => line.rows.map((row) => ({ line, row })));
  bars.sort((a, b) => spec.y(a.row) - spec.y(b.row));
  const roof = roofOf(bars.map((bar) => bar.row), spec);
  const trace = {
    type: "bar", orientation: "h", width: 0.4, cliponaxis: false,
    x: bars.map((bar) => spec.y(bar.row)), y: bars.map((_, i) => i),
    marker: { color: bars.map((bar) => bar.line.colour) },
    text: bars.map((bar) => brief(spec.y(bar.row))), textposition: "outside",
    hovertext: bars.map((bar) => hover(bar.row, bar.line, spec)), hoverinfo: "text",
  };
  const limit = Math.max(...trace.x, ...roof.map((each) => each[1]));
  plot(chart, [trace], {
    height: 46 + BAR * bars.length,
    margin: { l: 8, r: 8, t: 6, b: 36 },
    xaxis: axis(spec.unit, { range: [0, limit * 1.16] }),
    yaxis: { visible: false, fixedrange: true, range: [-0.4, bars.length - 0.1] },
    annotations: bars.map((bar, i) => ({
      x: 0, y: i + 0.44, text: verbatim(bar.line.label), showarrow: false, xanchor: "left", xshift: -2,
      font: { size: 11.5, color: theme("text") },
    })),
    shapes: roof.map((each) => ({
      type: "line", x0: each[1], x1: each[1], yref: "paper", y0: 0, y1: 1, layer: "below",
      line: { color: theme("quiet"), dash: "dash", width: 1.5 },
    })),
  });
}
