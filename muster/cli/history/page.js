"use strict";
// Draws the timeline of one job. The data stands in this page; nothing is loaded, and text is only set as text.

const data = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["joining", "starting", "first", "training", "hung", "paused", "saving", "stopping", "between", "waiting",
  "lost"];
// Of phases that share a pixel, the one with the highest number is shown.
const WEIGHT = [2, 3, 4, 1, 10, 5, 6, 7, 8, 9, 11];
const BUCKETS = {productive: "training", start: "starting", waiting: "waiting", detect: "failure", stop: "stopping",
  round: "between", restart: "first", repeated: "note", checkpoint: "saving", hang: "hung", end: "joining",
  pause: "paused", unfinished: "joining"};
const LEFT = 150, AXIS = 22, MARKS = 20, ROW = 18, RANK = 13, LINES = 90, GAP = 8;
const BAD = new Set(["failure", "hang", "node"]);

const canvas = document.getElementById("chart"), pen = canvas.getContext("2d"), tip = document.getElementById("tip");
const total = Math.max(1, data.total);
let from = 0, until = total, width = 800, rows = [], colour = {};
const opened = new Set();

// -- data ------------------------------------------------------------------------------------------------------------

// Bars come as [gap to the one before, length, phase, round] in milliseconds.
const nodes = data.nodes.map((node) => {
  const count = node.bars.length / 4, start = new Float64Array(count), end = new Float64Array(count);
  const phase = new Uint8Array(count), round = new Int32Array(count);
  for (let i = 0, at = 0; i < count; i++) {
    start[i] = at + node.bars[4 * i];
    at = end[i] = start[i] + node.bars[4 * i + 1];
    phase[i] = node.bars[4 * i + 2];
    round[i] = node.bars[4 * i + 3];
  }
  return {...node, start, end, phase, round};
});

function findRanks(node, round) {
  let found = null;
  for (const each of node.ranks) if (each[0] <= round) found = each;
  return found;
}

function listRows() {
  rows = [];
  data.groups.forEach((group, number) => {
    const isOpen = opened.has(`g${number}`) || group.length === 1;
    if (!isOpen) {
      rows.push({node: nodes[group[0]], label: `▸ ${data.labels[number]}`, key: `g${number}`, height: ROW});
      return;
    }
    if (group.length > 1) {
      rows.push({label: `▾ ${data.labels[number]}`, key: `g${number}`, height: ROW});
    }
    for (const index of group) {
      const node = nodes[index], key = `n${index}`, isShown = opened.has(key);
      rows.push({node, label: `${isShown ? "▾" : "▸"} ${node.name}`, key, height: ROW});
      const most = Math.max(0, ...node.ranks.map((each) => each[2]));
      for (let local = 0; isShown && local < most; local++) {
        const last = node.ranks[node.ranks.length - 1];
        rows.push({node, local, key, height: RANK, label: `    rank ${last[1] + local}`});
      }
    }
  });
}

// -- time ------------------------------------------------------------------------------------------------------------

function toX(ms) { return LEFT + (ms - from) / (until - from) * (width - LEFT); }
function toMs(x) { return from + (x - LEFT) / (width - LEFT) * (until - from); }

function show(ms, digits) {
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(digits === undefined ? (s < 10 ? 2 : 1) : digits)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${(s % 60).toFixed(digits || 0)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
}

function showClock(ms) { return new Date(data.start * 1000 + ms).toISOString().slice(0, 19).replace("T", " "); }

function move(left, right) {
  const least = Math.min(total, 50), span = Math.min(total, Math.max(least, right - left));
  const middle = (left + right) / 2;
  from = Math.max(0, Math.min(total - span, middle - span / 2));
  until = from + span;
  draw();
}
function zoom(factor, at) {
  const x = at === undefined ? (from + until) / 2 : at;
  move(x - (x - from) * factor, x + (until - x) * factor);
}

// -- drawing ---------------------------------------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [...PHASES, "back", "text", "dim", "line", "panel", "failure", "note"]) {
    colour[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function draw() {
  listRows();
  const series = data.lines.length ? data.lines.length * (LINES + GAP) : 0;
  const height = AXIS + MARKS + rows.reduce((sum, row) => sum + row.height, 0) + GAP + series;
  const ratio = window.devicePixelRatio || 1;
  width = canvas.clientWidth || 800;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colour.back;
  pen.fillRect(0, 0, width, height);
  pen.font = '12px system-ui, "DejaVu Sans", sans-serif';
  pen.textBaseline = "middle";
  drawAxis(height);
  let y = AXIS + MARKS;
  for (const row of rows) {
    row.y = y;
    drawRow(row);
    y += row.height;
  }
  pen.font = '12px system-ui, "DejaVu Sans", sans-serif';
  drawMarks(y);
  y += GAP;
  for (const line of data.lines) {
    drawLine(line, y);
    y += LINES + GAP;
  }
  document.getElementById("where").textContent =
    `${show(from)} to ${show(until)} of ${show(total)}`;
}

function findTick() {
  const least = (until - from) / Math.max(2, (width - LEFT) / 110);
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 3e4, 6e4, 12e4, 3e5, 6e5, 12e5, 18e5, 36e5,
    72e5, 144e5, 216e5, 432e5, 864e5, 1728e5];
  return steps.find((step) => step >= least) || 864e5 * Math.ceil(least / 864e5);
}

function drawAxis(height) {
  const step = findTick();
  pen.strokeStyle = colour.line;
  pen.fillStyle = colour.dim;
  for (let ms = Math.ceil(from / step) * step; ms <= until; ms += step) {
    const x = Math.round(toX(ms)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, AXIS - 5);
    pen.lineTo(x, height);
    pen.stroke();
    pen.fillText(show(ms, step < 1000 ? 3 - Math.floor(Math.log10(step)) : 0), x + 3, AXIS / 2);
  }
}

function drawRow(row) {
  const y = row.y, tall = row.height - (row.local === undefined ? 3 : 1);
  pen.fillStyle = row.local === undefined ? colour.text : colour.dim;
  pen.font = `${row.local === undefined ? 12 : 10}px system-ui, "DejaVu Sans", sans-serif`;
  if (row.label) pen.fillText(row.label, 6, y + row.height / 2, LEFT - 12);
  if (!row.node) return;
  const {start, end, phase, round} = row.node;
  let low = 0, high = start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] < from) low = middle + 1; else high = middle;
  }
  let column = -1, worst = -1;
  for (let i = low; i < start.length && start[i] <= until; i++) {
    let left = Math.max(LEFT, toX(start[i])), right = Math.min(width, toX(end[i]));
    if (row.local !== undefined) {
      const ranks = findRanks(row.node, round[i]);
      if (!ranks || row.local >= ranks[2] || ![2, 3, 4, 5, 6, 7].includes(phase[i])) continue;
      const rank = ranks[1] + row.local;
      const exit = row.node.exits.find((each) => each[1] === rank && each[3] === round[i]);
      if (exit && exit[0] < start[i]) continue;
      if (exit && exit[0] < end[i]) right = Math.min(right, toX(exit[0]));
    }
    if (right - left < 1) { // many may share a pixel
      const x = Math.floor(left);
      if (x === column && WEIGHT[phase[i]] <= worst) continue;
      column = x;
      worst = WEIGHT[phase[i]];
      pen.fillStyle = colour[PHASES[phase[i]]];
      pen.fillRect(x, y + 1, 1, tall);
      continue;
    }
    if (Math.floor(left) === column) left = column + 1;
    pen.fillStyle = colour[PHASES[phase[i]]];
    pen.fillRect(left, y + 1, right - left, tall);
  }
  if (row.local !== undefined) {
    pen.fillStyle = colour.failure;
    for (const exit of row.node.exits) {
      const ranks = findRanks(row.node, exit[3]);
      if (ranks && exit[1] === ranks[1] + row.local && exit[0] >= from && exit[0] <= until) {
        pen.fillRect(toX(exit[0]) - 1.5, y + 1, 3, tall);
      }
    }
  }
}

function drawMarks(bottom) {
  pen.lineWidth = 1;
  let last = -100;
  for (const [ms, kind, , node] of data.marks) {
    if (ms < from || ms > until) continue;
    const x = toX(ms), isBad = BAD.has(kind);
    if (x - last < 1 && !isBad) continue;
    last = x;
    pen.fillStyle = pen.strokeStyle = isBad ? colour.failure : colour.note;
    pen.globalAlpha = 0.45;
    if (node < 0 && kind !== "checkpoint") {
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, AXIS + MARKS);
      pen.lineTo(Math.round(x) + 0.5, bottom);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    const y = AXIS + MARKS / 2;
    pen.beginPath();
    if (kind === "hang") {
      pen.rect(x - 5, y - 5, 10, 10);
    } else if (isBad) {
      pen.moveTo(x, y + 6);
      pen.lineTo(x - 6, y - 5);
      pen.lineTo(x + 6, y - 5);
    } else {
      pen.arc(x, y, 4, 0, 7);
    }
    pen.fill();
  }
}

function drawLine(line, y) {
  const {t, v} = line;
  let low = 0, high = t.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (t[middle] < from) low = middle + 1; else high = middle;
  }
  const first = Math.max(0, low - 1);
  let last = first, least = Infinity, most = -Infinity;
  for (let i = first; i < t.length; i++) {
    last = i;
    least = Math.min(least, v[i]);
    most = Math.max(most, v[i]);
    if (t[i] > until) break;
  }
  pen.fillStyle = colour.panel;
  pen.fillRect(LEFT, y, width - LEFT, LINES);
  pen.fillStyle = colour.text;
  pen.fillText(line.name, 6, y + LINES / 2, LEFT - 12);
  if (!(most >= least)) return;
  pen.fillStyle = colour.dim;
  pen.textAlign = "right";
  pen.fillText(String(+most.toPrecision(4)), LEFT - 6, y + 7, LEFT / 2);
  pen.fillText(String(+least.toPrecision(4)), LEFT - 6, y + LINES - 7, LEFT / 2);
  pen.textAlign = "left";
  const span = most - least || 1;
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, y, width - LEFT, LINES);
  pen.clip();
  pen.strokeStyle = colour.note;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let i = first; i <= last; i++) {
    const x = toX(t[i]), at = y + LINES - 4 - (v[i] - least) / span * (LINES - 8);
    // Steps that are done again begin further down: no line joins them.
    if (i === first || (line.name === "step" && v[i] < v[i - 1])) pen.moveTo(x, at); else pen.lineTo(x, at);
  }
  pen.stroke();
  pen.restore();
}

// -- what is asked of it ---------------------------------------------------------------------------------------------

function describeAt(x, y) {
  if (x < LEFT) return "";
  const ms = toMs(x), near = (until - from) / (width - LEFT) * 6;
  const marks = data.marks.filter((mark) => Math.abs(mark[0] - ms) < near).slice(0, 6);
  const lines = [`${show(ms)}  (${showClock(ms)} UTC)`];
  const row = rows.find((each) => y >= each.y && y < each.y + each.height);
  if (row && row.node) {
    const {start, end, phase, round, name, host} = row.node;
    let where = `${name}${host ? ` (${host})` : ""}`;
    for (let i = 0; i < start.length; i++) {
      if (start[i] <= ms && ms < end[i]) {
        const ranks = findRanks(row.node, round[i]);
        if (row.local !== undefined && ranks) where = `rank ${ranks[1] + row.local}, ${where}`;
        lines.push(`${where}: ${data.phases[phase[i]]}, ${show(end[i] - start[i])}, round ${round[i]}`);
        break;
      }
    }
  }
  for (const line of data.lines) {
    const at = line.t.findIndex((each) => each > ms);
    const v = line.v[at < 0 ? line.v.length - 1 : Math.max(0, at - 1)];
    if (v !== undefined && line.t[0] <= ms) lines.push(`${line.name} ${+v.toPrecision(6)}`);
  }
  return [...lines, ...marks.map((mark) => `${mark[1]}: ${mark[2]}${describeStart(mark)}`)].join("\n");
}

// When a hang began: that is before it was seen.
function describeStart([ms, , , , , since]) {
  return since === undefined ? "" : ` (since ${show(since)}, for ${show(ms - since)})`;
}

function openAt(y) {
  const row = rows.find((each) => y >= each.y && y < each.y + each.height);
  if (!row) return;
  if (opened.has(row.key)) opened.delete(row.key); else opened.add(row.key);
  draw();
}

function goToMark(direction) {
  const middle = (from + until) / 2, edge = (until - from) * 0.01;
  const later = data.marks.filter((mark) => direction > 0 ? mark[0] > middle + edge : mark[0] < middle - edge);
  const mark = direction > 0 ? later[0] : later[later.length - 1];
  if (mark) showSpan(mark[0], Math.min(until - from, Math.max(total / 8, 2000)));
}
function showSpan(ms, span) { move(ms - span / 2, ms + span / 2); }

let dragged = null;
canvas.addEventListener("pointerdown", (event) => {
  dragged = {x: event.offsetX, y: event.offsetY, from, until, moved: false};
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (dragged) {
    const ms = (dragged.x - event.offsetX) / (width - LEFT) * (dragged.until - dragged.from);
    dragged.moved = dragged.moved || Math.abs(dragged.x - event.offsetX) > 3;
    if (dragged.moved) move(dragged.from + ms, dragged.until + ms);
    return;
  }
  const text = describeAt(event.offsetX, event.offsetY);
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
});
canvas.addEventListener("pointerup", (event) => {
  if (dragged && !dragged.moved) openAt(event.offsetY);
  dragged = null;
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("dblclick", (event) => zoom(0.4, toMs(event.offsetX)));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.exp(event.deltaY / 300), toMs(event.offsetX));
}, {passive: false});

function openAll() {
  if (opened.size) opened.clear(); else data.groups.forEach((_, number) => opened.add(`g${number}`));
  draw();
}
const KEYS = {
  "ArrowLeft": () => move(from - (until - from) / 5, until - (until - from) / 5),
  "ArrowRight": () => move(from + (until - from) / 5, until + (until - from) / 5),
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => move(0, total),
  "n": () => goToMark(1), "p": () => goToMark(-1), "o": openAll,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const [id, key] of [["zoom-in", "+"], ["zoom-out", "-"], ["zoom-all", "0"], ["previous", "p"], ["next", "n"]]) {
  document.getElementById(id).addEventListener("click", KEYS[key]);
}

// -- the rest of the page --------------------------------------------------------------------------------------------

function add(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  parent.appendChild(made);
  return made;
}

function addLegend(parent, entries) {
  for (const [name, text] of entries) {
    const item = add(parent, "span");
    add(item, "i").style.background = `var(--${name})`;
    item.appendChild(document.createTextNode(text));
  }
}

function addBar(parent, entries) {
  const sum = entries.reduce((so, each) => so + each[1], 0) || 1;
  for (const [name, seconds] of entries) {
    const part = add(parent, "div");
    part.style.width = `${100 * seconds / sum}%`;
    part.style.background = `var(--${BUCKETS[name] || "joining"})`;
    part.title = `${name}: ${show(seconds * 1000)} (${(100 * seconds / sum).toFixed(1)} %)`;
  }
}

function addTable(parent, heads, lines, fill) {
  const MOST = 500, table = add(parent, "table"), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  heads.forEach((name) => add(head, "th", name));
  lines.slice(0, MOST).forEach((line) => {
    const row = add(body, "tr");
    const ms = fill(row, line);
    row.tabIndex = 0;
    const go = () => { showSpan(ms[0], Math.max(2000, ms[1] * 3, total / 200)); canvas.scrollIntoView({block: "nearest"}); };
    row.addEventListener("click", go);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target === row) go(); });
  });
  if (lines.length > MOST) add(parent, "p", `and ${lines.length - MOST} more`);
}

addBar(document.getElementById("lost"), data.buckets);
addLegend(document.getElementById("lost-legend"),
  data.buckets.map(([name, seconds, words]) => [BUCKETS[name] || "joining", `${name} ${show(seconds * 1000)} ${words}`]));
addLegend(document.getElementById("legend"), data.phases.map((name, number) => [PHASES[number], name]));
addLegend(document.getElementById("legend"), [["failure", "▼ failure, lost node; ■ hang"], ["note", "● join, drain, save, end"]]);
const recoveries = document.getElementById("recoveries");
if (data.recoveries.length) {
  addTable(recoveries, ["at", "cost", "parts", "cause"], data.recoveries, (row, {t, cost, parts, cause}) => {
    add(row, "td", show(t), "time");
    add(row, "td", cost === null ? "not completed" : show(cost * 1000), "number");
    const cell = add(row, "td");
    addBar(add(cell, "div", undefined, "parts"), parts);
    add(cell, "div", parts.map(([name, seconds]) => `${name} ${show(seconds * 1000)}`).join(", "), "legend");
    add(row, "td", cause);
    return [t, (cost || 1) * 1000];
  });
} else {
  add(recoveries, "p", "none");
}
const saves = data.marks.filter((mark) => mark[1] === "checkpoint").length, marks = document.getElementById("marks");
addTable(marks, ["at", "UTC", "node", "what", ""], data.marks.filter((mark) => mark[1] !== "checkpoint"), (row, mark) => {
  const [ms, kind, text, node, report] = mark;
  add(row, "td", show(ms), "time");
  add(row, "td", showClock(ms), "time");
  add(row, "td", node < 0 ? "" : String(node), "number");
  add(row, "td", kind, `${kind} kind`);
  const cell = add(row, "td", text + describeStart(mark));
  if (report) {
    const more = add(cell, "details");
    add(more, "summary", "report");
    add(more, "pre", report);
    more.addEventListener("click", (event) => event.stopPropagation());
  }
  return [ms, 1000];
});
if (saves) add(marks, "p", `and ${saves} checkpoint${saves === 1 ? "" : "s"} that all ranks have saved`);

readColours();
draw();
window.addEventListener("resize", draw);
const redraw = () => { readColours(); draw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", redraw);
window.addEventListener("beforeprint", redraw);
window.addEventListener("afterprint", redraw);
