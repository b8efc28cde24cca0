// Elements, groups and numbers: what all parts of the page use.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children; text never becomes markup.
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function host(section) {
  return document.querySelector(`#${section} [data-host]`);
}

function grouped(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  return groups;
}

function unique(items) {
  return [...new Set(items)];
}

const byNumber = (a, b) => a - b;

// 4 significant digits; very small and very large numbers with a power of ten.
function brief(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// 8192 → "8k"
function tokens(count) {
  if (count >= 1 << 20 && count % (1 << 20) === 0) return `${count >> 20}M`;
  return count >= 1024 && count % 1024 === 0 ? `${count / 1024}k` : String(count);
}

function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Plotly reads a little markup in its texts: names are to be shown as they are.
function verbatim(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function style(implementation) {
  return data.styles[implementation];
}

function legend(implementations) {
  const items = unique(implementations).map((name) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${style(name).colour}` }), name)
  );
  return element("ul", { class: "legend", "aria-label": "Colours" }, ...items);
}
