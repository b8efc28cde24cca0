// Schedules: which one is shown, at which step, and the animation; scene.js draws it.
"use strict";

const SCENE_FIELDS = { documents: "Tokens", layout: "Layout", route: "Route", world_size: "Ranks", passes: "Pass" };
const SCENE_START = { layout: "zigzag", route: "ring, one source a launch", world_size: "4" };
const STEP_MS = 1600;
const scene = { now: null, step: 0, part: 0.5, playing: false, last: 0, moving: [], width: 0 };

function startScenes() {
  const form = document.getElementById("scene-choice");
  for (const [field, label] of Object.entries(SCENE_FIELDS)) {
    const select = element("select", { id: `scene-${field}` });
    form.append(element("label", {}, `${label} `, select));
    select.addEventListener("change", chooseScene);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  const slider = document.getElementById("scene-step");
  slider.addEventListener("input", () => { pause(); goTo(Number(slider.value)); });
  document.getElementById("scene-back").addEventListener("click", () => { pause(); goTo(scene.step - 1); });
  document.getElementById("scene-forward").addEventListener("click", () => { pause(); goTo(scene.step + 1); });
  document.getElementById("scene-play").addEventListener("click", () => (scene.playing ? pause() : play()));
  new ResizeObserver(() => host("schedules").clientWidth !== scene.width && drawScene()).observe(host("schedules"));
  chooseScene();
}

// Each choice offers what goes with those before it; what can stay, stays.
function chooseScene() {
  let left = data.scenes;
  for (const field of Object.keys(SCENE_FIELDS)) {
    const select = document.getElementById(`scene-${field}`);
    const options = unique(left.map((each) => String(each[field])));
    const wanted = [select.value, SCENE_START[field], options[0]].find((value) => options.includes(value));
    select.replaceChildren(...options.map((value) => element("option", { value, selected: value === wanted }, value)));
    left = left.filter((each) => String(each[field]) === wanted);
  }
  scene.now = left[0];
  document.getElementById("scene-step").max = scene.now.steps.length - 1;
  goTo(Math.min(scene.step, scene.now.steps.length - 1));
}

function goTo(step) {
  const count = scene.now.steps.length;
  scene.step = (step + count) % count;
  scene.part = scene.playing ? 0 : 0.5;
  const slider = document.getElementById("scene-step");
  slider.value = scene.step;
  slider.setAttribute("aria-valuetext", `step ${scene.step + 1} of ${count}`);
  drawScene();
}

function play() {
  scene.playing = true;
  showPlaying();
  scene.last = performance.now();
  goTo(scene.step === scene.now.steps.length - 1 ? 0 : scene.step);
  requestAnimationFrame(tick);
}

function pause() {
  scene.playing = false;
  showPlaying();
}

function showPlaying() {
  const button = document.getElementById("scene-play");
  button.textContent = scene.playing ? "Pause" : "Play";
  button.setAttribute("aria-pressed", scene.playing);
}

function tick(now) {
  if (!scene.playing) return;
  scene.part += (now - scene.last) / STEP_MS;
  scene.last = now;
  if (scene.part >= 1) {
    if (scene.step === scene.now.steps.length - 1) {
      pause();
      return goTo(scene.step);
    }
    goTo(scene.step + 1);
  }
  moveChips();
  requestAnimationFrame(tick);
}

function drawScene() {
  const { now, step } = scene;
  const place = clear(host("schedules"));
  scene.width = place.clientWidth;
  place.append(drawRanks(Math.max(300, Math.min(660, scene.width))), drawMatrix());
  const { work, pairs, moves } = now.steps[step];
  const longest = Math.max(...pairs);
  const idle = pairs.filter((each) => each === 0).length;
  document.getElementById("scene-text").textContent =
    `Step ${step + 1} of ${now.steps.length}: ${work.length ? `the busiest rank computes ${longest} pairs` : "nobody computes"}`
    + `${idle && work.length ? `, ${idle} wait` : ""}; ${moves.length || "no"} messages. `
    + `Over all steps, ranks compute for ${(100 * now.busy).toFixed(0)} % of the time that the busiest ones take.`;
}
