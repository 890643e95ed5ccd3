"use strict";
// Without this script the page is complete, but for the zoom and for what a large picture says of a place.
const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 6; // numbers that a bar takes in plan.rows
const [BAR, MEMORY, ROW] = plan.heights;
const MOST_NUMBERS = 4000;
const chart = document.querySelector(".chart");
const svg = document.getElementById("chart");
const tip = document.getElementById("tip");
const numbers = svg.querySelector(".numbers");
const found = svg.insertBefore(document.createElementNS(SPACE, "g"), numbers);
found.id = "found";
let zoom = 1;
let followed = null;

for (const title of svg.querySelectorAll("title")) title.remove(); // the browser would show them a second time

const percent = (time) => (100 * time) / plan.end + "%";
const say = (value) => String(Number(value.toPrecision(7)));

// The last of the sorted groups of `size` whose value at `at` is not beyond `time`; -1 if none is.
function last(values, size, at, time) {
  let low = 0;
  let high = values.length / size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle * size + at] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function element(parent, name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
}

function bar(rank, index) {
  const [kind, stage, microbatch, start, end, half] = plan.rows[rank].slice(index * WIDTH, (index + 1) * WIDTH);
  const height = half ? BAR / 2 : BAR;
  return { kind, stage, microbatch, start, end, half, height, top: rank * ROW + (half === 2 ? height : 0) };
}

function barAt(rank, time, y) {
  let index = last(plan.rows[rank], WIDTH, 3, time);
  if (index < 0) return null;
  let here = bar(rank, index);
  // Two that overlap begin at once, and the search finds the second.
  if (here.half === 2 && y < BAR / 2 && index > 0) here = bar(rank, index - 1);
  return time <= here.end ? here : null;
}

function heldAt(rank, time) {
  const changes = plan.memory[rank];
  const index = last(changes, 2, 0, time);
  return index < 0 ? 0 : changes[2 * index + 1];
}

function place(event) {
  const box = svg.getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top) / ROW);
  const time = ((event.clientX - box.left) / box.width) * plan.end;
  if (rank < 0 || rank >= plan.rows.length || time < 0 || time > plan.end) return null;
  return { rank, time, y: event.clientY - box.top - rank * ROW };
}

function told({ rank, time, y }) {
  const here = barAt(rank, time, y);
  const lines = [];
  if (here) {
    lines.push(`${plan.names[here.kind]} of micro-batch ${here.microbatch} on stage ${here.stage}`);
    lines.push(`${say(here.start)} to ${say(here.end)}: ${say(here.end - here.start)}`);
  } else {
    const idle = plan.idle[rank].find(([start, end]) => start <= time && time <= end);
    if (idle) lines.push(`idle from ${say(idle[0])} to ${say(idle[1])}: rank ${rank} ${idle[2]}`);
  }
  if (MEMORY) lines.push(`rank ${rank} holds ${say(heldAt(rank, time))} of at most ${say(plan.peaks[rank])}`);
  return [here, lines.join("\n")];
}

function outline(here, fill = "none") {
  element(found, "rect", {
    x: percent(here.start), y: here.top, width: percent(here.end - here.start), height: here.height, fill,
  });
}

function follow() {
  found.replaceChildren();
  chart.classList.toggle("lit", followed !== null);
  if (followed === null) return;
  plan.rows.forEach((row, rank) => {
    for (let index = 0; index * WIDTH < row.length; index++) {
      if (row[index * WIDTH + 2] !== followed) continue;
      const one = bar(rank, index);
      outline(one, plan.colours[one.kind]);
    }
  });
}

// The numbers of the bars that are in view and wide enough, if nearly all of them are.
function write() {
  numbers.replaceChildren();
  const width = svg.getBoundingClientRect().width;
  const scale = width / plan.end;
  const from = chart.scrollLeft / scale;
  const to = (chart.scrollLeft + chart.clientWidth) / scale;
  const seen = [];
  plan.rows.forEach((row, rank) => {
    for (let index = Math.max(0, last(row, WIDTH, 3, from)); index * WIDTH < row.length; index++) {
      if (row[index * WIDTH + 3] > to || seen.length > MOST_NUMBERS) break;
      seen.push(bar(rank, index));
    }
  });
  if (seen.length > MOST_NUMBERS) return;
  for (const size of [11, 9, 7.5]) {
    const fit = seen.filter((one) => (one.end - one.start) * scale >= size * (0.6 * String(one.microbatch).length + 0.2));
    if (fit.length < 0.9 * seen.length) continue;
    for (const one of fit) {
      const high = Math.min(size, one.height - 1);
      const y = one.top + one.height / 2 + 0.36 * high;
      element(numbers, "text", { x: percent((one.start + one.end) / 2), y, "font-size": high }, one.microbatch);
    }
    return;
  }
}

// Lines at round times, about so many in view.
function ticks() {
  const group = svg.querySelector(".ticks");
  const apart = (plan.end * 80) / svg.getBoundingClientRect().width;
  const power = 10 ** Math.floor(Math.log10(apart));
  const distance = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= apart);
  const bottom = plan.rows.length * ROW;
  const first = Math.max(0, Math.floor(((chart.scrollLeft / svg.getBoundingClientRect().width) * plan.end) / distance));
  group.replaceChildren();
  for (let step = first; step * distance <= plan.end && step < first + 60; step++) {
    const x = percent(step * distance);
    element(group, "line", { x1: x, x2: x, y1: 0, y2: bottom, stroke: "#c9ced4" });
    const anchor = step ? {} : { "text-anchor": "start" }; // left of the chart are names
    element(group, "text", { x, y: bottom + 12, "font-size": 10, ...anchor }, say(step * distance));
  }
}

function strokes() {
  const row = plan.rows.reduce((longest, other) => (other.length > longest.length ? other : longest), []);
  const width = (svg.getBoundingClientRect().width * WIDTH) / Math.max(row.length, 1); // a bar, on average
  for (const bars of svg.querySelectorAll(".bars")) {
    bars.setAttribute("stroke", width >= 4 ? "white" : "none");
    bars.setAttribute("stroke-width", "0.6");
  }
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    ticks();
    write();
  });
}

function setZoom(to, at = chart.clientWidth / 2) {
  const before = zoom;
  // No further than is needed for the shortest bars of the longest schedules.
  zoom = Math.min(1024, Math.max(1, to));
  const left = ((chart.scrollLeft + at) * zoom) / before - at;
  svg.style.width = zoom * 100 + "%";
  chart.scrollLeft = left;
  strokes();
  redraw();
}

document.getElementById("in").onclick = () => setZoom(zoom * 2);
document.getElementById("out").onclick = () => setZoom(zoom / 2);
document.getElementById("all").onclick = () => setZoom(1);
chart.addEventListener("scroll", redraw);
chart.addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  setZoom(zoom * 2 ** (-event.deltaY / 300), event.clientX - chart.getBoundingClientRect().left);
}, { passive: false });
chart.addEventListener("mousemove", (event) => {
  const where = place(event);
  tip.style.display = where ? "block" : "none";
  if (!where) return;
  const [here, text] = told(where);
  tip.textContent = text;
  if (followed === null) {
    found.replaceChildren();
    if (here) outline(here);
  }
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
});
chart.addEventListener("mouseleave", () => {
  tip.style.display = "none";
  if (followed === null) found.replaceChildren();
});
// A click shows one micro-batch's way through the ranks; another takes that back.
chart.addEventListener("click", (event) => {
  const where = place(event);
  const here = where && told(where)[0];
  followed = here && here.microbatch !== followed ? here.microbatch : null;
  follow();
});
addEventListener("resize", () => setZoom(zoom));
setZoom(1);
