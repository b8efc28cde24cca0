// Timelines of replays: launches and transfers, one lane each.
"use strict";

const LANES = ["network", "transfers", "compute"]; // from below
const DIRECTIONS = { forward: "#3b76c4", backward: "#d0652a" };
let chosenTimeline = null;

function drawTimelines(chosen) {
  const place = clear(host("timelines"));
  const fields = ["implementation", "shape", "device", "kind"];
  const found = data.timelines.filter((line) => fields.every((field) => chosen[field].has(line[field])));
  const directions = Object.keys(DIRECTIONS).filter((name) => chosen.passes.has(name) || chosen.passes.has("both"));
  if (!found.length || !directions.length) {
    return say(place, "None of the chosen rows has a timeline: rfa replay --svg … --json … records one.");
  }
  if (!found.includes(chosenTimeline)) chosenTimeline = found[0];
  const select = element("select", { id: "timeline-choice" },
    ...found.map((line, i) => element("option", { value: i, selected: line === chosenTimeline }, line.name)));
  select.addEventListener("change", () => { chosenTimeline = found[select.value]; drawTimelines(chosen); });
  place.append(element("div", { class: "controls" }, element("label", {}, "Replay ", select)));
  place.append(element("p", { class: "quiet" },
    `${chosenTimeline.note} Numbers are steps. Drag to zoom in, double-click to see all.`));
  place.append(element("ul", { class: "legend", "aria-label": "Colours" }, ...directions.map((name) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${DIRECTIONS[name]}` }), name))));
  drawTimeline(place, chosenTimeline, directions);
}

function drawTimeline(place, line, directions) {
  const bars = line.bars.map(([lane, direction, label, start, end]) => ({ lane, direction, label, start, end }))
    .filter((bar) => directions.includes(bar.direction));
  const end = Math.max(0, ...bars.map((bar) => bar.end));
  const chart = place.appendChild(element("div", { class: "chart", role: "img",
    "aria-label": `Timeline of ${line.name}: ${bars.length} bars in ${brief(end)} ms` }));
  const traces = directions.map((direction) => {
    const own = bars.filter((bar) => bar.direction === direction);
    return {
      type: "bar", orientation: "h", name: direction,
      base: own.map((bar) => bar.start), x: own.map((bar) => bar.end - bar.start),
      y: own.map((bar) => verbatim(bar.lane)), width: 0.7,
      marker: { color: DIRECTIONS[direction], line: { color: DIRECTIONS[direction], width: 1 } },
      text: own.map((bar) => verbatim(bar.label)), textposition: "inside", insidetextanchor: "middle",
      textangle: 0, insidetextfont: { color: "#fff" }, hoverinfo: "text",
      hovertext: own.map((bar) => `${verbatim(bar.lane)}, ${direction}, step ${verbatim(bar.label)}<br>`
        + `<b>${brief(bar.end - bar.start)} ms</b>, from ${brief(bar.start)} to ${brief(bar.end)} ms`),
    };
  });
  plot(chart, traces, {
    height: 230, margin: { l: 52, r: 12, t: 40, b: 42 }, barmode: "overlay", bargap: 0.2,
    xaxis: axis("ms since the run began", { range: [0, end * 1.01] }),
    yaxis: axis("", { fixedrange: true, categoryorder: "array",
      categoryarray: LANES.filter((lane) => line.bars.some(([name]) => name === lane)) }),
    modebar: { bgcolor: "rgba(0,0,0,0)", color: theme("quiet"), activecolor: theme("text") },
  }, { displayModeBar: true, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] });
}
