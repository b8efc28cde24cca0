// Plotly in the page's colours; a chart is drawn when it comes near the screen.
"use strict";

const waiting = new Map(); // what draws each chart that nobody has seen yet
const watcher = new IntersectionObserver(
  (entries) => entries.filter((each) => each.isIntersecting).forEach((each) => drawNow(each.target)),
  { rootMargin: "600px" },
);

function plot(chart, traces, layout, config = {}) {
  const touch = matchMedia("(pointer: coarse)").matches; // there, a finger scrolls the page
  const all = {
    font: { family: theme("font"), size: 12, color: theme("text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 12, t: 8, b: 42 }, showlegend: false, dragmode: touch ? false : "zoom",
    hoverlabel: {
      align: "left", bgcolor: theme("card"), bordercolor: theme("line"), font: { color: theme("text") },
    },
    ...layout,
  };
  const options = { responsive: true, displaylogo: false, displayModeBar: false, ...config };
  chart.style.height = `${layout.height}px`;
  waiting.set(chart, () => Plotly.newPlot(chart, traces, all, options));
  watcher.observe(chart);
}

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 6 }, gridcolor: theme("line"), zerolinecolor: theme("line"),
    linecolor: theme("line"), automargin: true, ...more,
  };
}

function drawNow(chart) {
  const draw = waiting.get(chart);
  forget(chart);
  if (draw) draw();
}

function forget(chart) {
  waiting.delete(chart);
  watcher.unobserve(chart);
}

// Of the whole page, or of a part.
function drawWaiting(part = document) {
  [...waiting.keys()].filter((chart) => part.contains(chart)).forEach(drawNow);
}

// Empty a place, and let plotly forget the charts that were in it.
function clear(place) {
  place.querySelectorAll(".chart").forEach(forget);
  place.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
  place.replaceChildren();
  return place;
}

function say(place, sentence) {
  clear(place).append(element("p", { class: "nothing" }, sentence));
}

window.addEventListener("beforeprint", () => drawWaiting());
