"use strict";
// Without this script the page is complete, but for the zoom and for numbers that fit where the window is wider.
const charts = [...document.querySelectorAll(".chart")];
const tip = document.getElementById("tip");
let zoom = 1;

function fit() {
  for (const chart of charts) {
    const svg = chart.firstElementChild;
    svg.style.width = zoom * 100 + "%";
    for (const ticks of svg.querySelectorAll(".z")) {
      ticks.style.visibility = zoom >= Number(ticks.dataset.z) ? "visible" : "hidden";
    }
    const width = svg.getBoundingClientRect().width;
    const tasks = [...svg.querySelectorAll(".t")].map((task) => {
      const [, bar, number] = task.children;
      const room = (parseFloat(bar.getAttribute("width")) * width) / 100;
      return [number, room >= 6.4 * number.textContent.length + 3];
    });
    const most = 2 * tasks.filter(([, fits]) => fits).length >= tasks.length; // some here and there would only puzzle
    for (const [number, fits] of tasks) number.style.visibility = most && fits ? "visible" : "hidden";
  }
}

function setZoom(to) {
  const before = zoom;
  zoom = Math.min(256, Math.max(1, to));
  const middles = charts.map((chart) => (chart.scrollLeft + chart.clientWidth / 2) / before);
  fit();
  charts.forEach((chart, k) => (chart.scrollLeft = middles[k] * zoom - chart.clientWidth / 2));
}

document.getElementById("in").onclick = () => setZoom(zoom * 2);
document.getElementById("out").onclick = () => setZoom(zoom / 2);
document.getElementById("all").onclick = () => setZoom(1);

for (const chart of charts) {
  for (const task of chart.querySelectorAll(".t")) {
    const title = task.querySelector("title"); // would be shown a second time, by the browser
    task.dataset.tip = title.textContent;
    title.textContent = "";
  }
  chart.addEventListener("mousemove", (event) => {
    const task = event.target.closest(".t");
    tip.style.display = task ? "block" : "none";
    if (!task) return;
    tip.textContent = task.dataset.tip;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
  });
  chart.addEventListener("mouseleave", () => (tip.style.display = "none"));
  // A click shows one micro-batch's way through the partitions; another takes that back.
  chart.addEventListener("click", (event) => {
    const task = event.target.closest(".t");
    const again = task && task.classList.contains("on");
    for (const other of chart.querySelectorAll(".on")) other.classList.remove("on");
    chart.classList.toggle("lit", Boolean(task) && !again);
    if (!task || again) return;
    for (const same of chart.querySelectorAll(`.t[data-m="${task.dataset.m}"]`)) same.classList.add("on");
  });
}
addEventListener("resize", fit);
fit();
