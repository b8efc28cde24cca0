// One step of a schedule: ranks and what they send on one side, the matrix that fills up on the other.
"use strict";

const ROW = 46; // px of a rank
const TOP = 22; // px above the ranks

// Where things are, in px, for a picture of this width.
function geometry(width) {
  const narrow = width < 420;
  return { width, narrow, left: narrow ? 34 : 72, split: Math.round(width * 0.62), chip: narrow ? 32 : 40 };
}

function rankColour(rank) {
  return data.colours[scene.now.world_size][rank];
}

function rowMiddle(rank) {
  return TOP + ROW * rank + ROW / 2 - 3;
}

// A shard, in the colour of its owner; a narrow one has its number only.
function chip(letter, owner, width) {
  return drawn("g", {},
    drawn("rect", { x: -width / 2, y: -10, width, height: 20, rx: 5, fill: rankColour(owner) }),
    drawn("text", { class: "chip", y: 4 }, width < 26 ? String(owner) : `${letter}${owner}`));
}

function moveTo(shape, x, y) {
  shape.setAttribute("transform", `translate(${x} ${y})`);
  return shape;
}

function drawRanks(width) {
  const { now, step } = scene;
  const { work, pairs, moves } = now.steps[step];
  const at = geometry(width);
  const picture = drawn("svg", { width, height: TOP + ROW * now.world_size, role: "img",
    "aria-label": `What ${now.world_size} ranks compute and send in step ${step + 1}` },
  drawn("text", { class: "head", x: at.left, y: 12 }, "computes"),
  drawn("text", { class: "head", x: at.split + 8, y: 12 }, "sends"));
  for (let rank = 0; rank < now.world_size; rank++) {
    const own = work.filter((each) => each[0] === rank);
    picture.append(drawRank(rank, own, pairs[rank] / (Math.max(...pairs) || 1), at));
  }
  scene.moving = moves.map((move, i) => drawMove(picture, move, (i + 0.5) / moves.length, moves.length, at));
  moveChips();
  return picture;
}

// What a rank computes, and below, how long that takes compared with the busiest rank.
function drawRank(rank, own, share, at) {
  const y = rowMiddle(rank);
  const room = at.split - at.left - 14;
  const line = drawn("g", {},
    drawn("circle", { cx: 8, cy: y, r: 7, fill: rankColour(rank) }),
    drawn("text", { x: 20, y: y + 4 }, at.narrow ? String(rank) : `rank ${rank}`),
    drawn("rect", { class: "time", x: at.left, y: y + 10, width: room, height: 4, rx: 2 }),
    drawn("rect", { x: at.left, y: y + 10, width: room * share, height: 4, rx: 2, fill: rankColour(rank) }));
  if (!own.length) line.append(drawn("text", { class: "idle", x: at.left, y: y + 1 }, "waits"));
  const grouped = scene.now.fills.length > 1; // by heads, which are named then
  let x = at.left;
  for (const [, queries, keys, heads] of own) {
    const shards = [...queries.map((owner) => ["Q", owner]), ...keys.map((owner) => ["K", owner])];
    const each = Math.min(at.chip, (room - (grouped ? 50 : 6)) / shards.length - 3);
    for (const [letter, owner] of shards) {
      if (letter === "K" && owner === keys[0]) x += 6;
      line.append(moveTo(chip(letter, owner, each), x + each / 2, y - 5));
      x += each + 3;
    }
    if (grouped) line.append(drawn("text", { class: "idle", x: x + 2, y: y - 1 }, `head ${heads.join(",")}`));
  }
  return line;
}

// A bow from one rank to another, and what goes along it: a dot where there are many.
function drawMove(picture, [what, source, target], share, count, at) {
  const [, letter, owner] = what.match(/^(\D+)(\d+)/);
  const crowded = count > scene.now.world_size;
  const size = crowded ? 10 : at.chip;
  const start = at.split + 8;
  const reach = (at.width - start - size - 2) * share;
  const bend = start + reach * 4 / 3; // a bow goes three quarters of the way to its bend
  const [from, to] = [rowMiddle(source) - 4, rowMiddle(target) + 4];
  const path = drawn("path", { class: "way", stroke: rankColour(owner),
    d: `M ${start} ${from} C ${bend} ${from}, ${bend} ${to}, ${start} ${to}` });
  const moved = crowded ? drawn("g", {}, drawn("circle", { r: 5, fill: rankColour(owner) })) : chip(letter, owner, size);
  moved.append(drawn("title", {}, `${what}: rank ${source} → rank ${target}`));
  picture.append(path, moved);
  return { path, moved, shift: size / 2 };
}

function moveChips() {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const part = still ? 0.5 : Math.min(1, scene.part);
  for (const { path, moved, shift } of scene.moving) {
    const point = path.getPointAtLength(path.getTotalLength() * part);
    moveTo(moved, point.x + shift, point.y);
  }
}

// Queries downwards, keys to the right: a cell gets its rank's colour in the step that computes it.
function drawMatrix() {
  const { now, step } = scene;
  const size = now.owners.length;
  const edge = size / 22; // for the colours of those who hold queries and keys
  const parts = now.owners.flatMap((owner, i) => [
    drawn("rect", { x: -edge * 1.3, y: i, width: edge, height: 1, fill: rankColour(owner) }),
    drawn("rect", { x: i, y: -edge * 1.3, width: 1, height: edge, fill: rankColour(owner) }),
  ]);
  for (let query = 0; query < size; query++) {
    for (let key = 0; key < size; key++) {
      const steps = now.fills.map((fill) => fill[query * size + key]).filter((mark) => mark !== ".");
      if (steps.length) parts.push(...drawCells(query, key, steps.map((mark) => parseInt(mark, 36)), step));
    }
  }
  const box = `${-edge * 1.5} ${-edge * 1.5} ${size + edge * 1.6} ${size + edge * 1.6}`;
  return drawn("svg", { class: "matrix", viewBox: box, role: "img",
    "aria-label": `Queries by keys: what is computed up to step ${step + 1}` }, ...parts);
}

// Of one rank, or where each head is another rank's, a stripe of each.
function drawCells(query, key, steps, step) {
  const { owners, by_key, by_head } = scene.now;
  if (!by_head) return [drawCell(query, key, steps, step, owners[by_key ? key : query], 0, 1)];
  const node = owners[query] - (owners[query] % by_head);
  return steps.map((each, head) =>
    drawCell(query, key, [each], step, node + head, head / by_head, 1 / by_head));
}

// Strong in its own step, paler afterwards; half as strong while one of two head groups is missing.
function drawCell(query, key, steps, step, rank, left, width) {
  const done = steps.filter((each) => each <= step).length / steps.length;
  const fresh = steps.includes(step);
  const colour = done ? { fill: rankColour(rank), "fill-opacity": done * (fresh ? 1 : 0.42) } : {};
  return drawn("rect", { class: done ? (fresh ? "fresh" : "done") : "empty", x: key + 0.04 + 0.92 * left,
    y: query + 0.04, width: 0.92 * width, height: 0.92, rx: 0.12 * width, ...colour });
}
