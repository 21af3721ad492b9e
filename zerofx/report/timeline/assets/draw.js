// Painting on the canvas.  What is narrower than a pixel is merged: a picture costs its pixels.

const canvas = document.getElementById("chart");
const paint = canvas.getContext("2d");
const LEFT = 132;
const RIGHT = 18;
const FONT = '12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const SMALL = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

const axes = { time: axisOfTime(), order: axisOfOrder() };
let axis = given.end_s > 0 ? axes.time : axes.order;
const view = { begin: 0, end: axis.end || 1 };
const chosen = { matching: null, hover: null, pin: null, drag: null, tensor: -1 };

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// From top to bottom: an overview, memory, memory on the host, a row for each lane, the axis.
function layout() {
  const areas = [];
  let y = 8;
  const add = (area, height, gap) => {
    areas.push(Object.assign(area, { y, height }));
    y += height + gap;
  };
  add({ what: "overview", label: "whole step" }, 30, 16);
  add({ what: "memory", place: "device", label: "device memory" }, 270, 14);
  if (stacks.host.length) add({ what: "memory", place: "host", label: "host memory" }, 76, 14);
  for (const lane of given.lanes) {
    const measured = axis.measured.get(lane);
    add({ what: "lane", lane, label: lane, events: axis.lanes.get(lane) || [] }, 24, measured ? 2 : 7);
    if (measured) add({ what: "lane", lane, label: "measured", events: measured, isMeasured: true }, 18, 9);
  }
  add({ what: "axis" }, 24, 4);
  return { areas, height: y };
}

let page = layout();
const width = () => canvas.clientWidth - LEFT - RIGHT;
const toX = (value) => LEFT + ((value - view.begin) / (view.end - view.begin)) * width();
const toValue = (x) => view.begin + ((x - LEFT) / width()) * (view.end - view.begin);

// For each pixel of a span of the axis, the node at which most is in memory.
function highest(total, begin, end, pixels) {
  const at = new Int32Array(pixels).fill(-1);
  const begins = axis.begins;
  let position = Math.max(firstAfter(begins, begin) - 1, 0);
  for (let x = 0; x < pixels && count; x++) {
    const until = begin + ((x + 1) / pixels) * (end - begin);
    let best = position;
    while (position + 1 < count && begins[position + 1] < until) {
      position++;
      if (total[position] > total[best]) best = position;
    }
    at[x] = best;
  }
  return at;
}

// ``2.5 GiB``, as people write round numbers.
function round(bytes) {
  const [number, unit] = size(bytes).split(" ");
  return `${Number(number)} ${unit}`;
}

function niceStep(range, most, base) {
  const least = range / most;
  let step = base;
  if (base === 2) {
    while (step < least) step *= 2;
    return step;
  }
  step = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * step).find((value) => value >= least * 0.999);
}

function fillStack(area, at, layers, matching) {
  const bottom = area.y + area.height;
  const scale = area.height / area.most;
  const below = new Float64Array(at.length);
  layers.forEach((layer) => {
    if (hidden.has(layer.kind)) return;
    paint.beginPath();
    paint.moveTo(LEFT, bottom - below[0] * scale);
    for (let x = 0; x < at.length; x++) {
      const y = bottom - below[x] * scale;
      paint.lineTo(LEFT + x, y);
      paint.lineTo(LEFT + x + 1, y);
    }
    for (let x = at.length - 1; x >= 0; x--) {
      below[x] += layer.bytes[at[x]];
      const y = bottom - below[x] * scale;
      paint.lineTo(LEFT + x + 1, y);
      paint.lineTo(LEFT + x, y);
    }
    paint.closePath();
    paint.globalAlpha = matching ? 0.3 : 1;
    paint.fillStyle = layer.colour;
    paint.fill();
    paint.globalAlpha = 1;
  });
  // A seam between neighbours, for whoever sees their colours as one.
  paint.strokeStyle = theme("--ground");
  paint.lineWidth = 0.8;
  below.fill(0);
  layers.forEach((layer) => {
    if (hidden.has(layer.kind)) return;
    paint.beginPath();
    for (let x = 0; x < at.length; x++) {
      below[x] += layer.bytes[at[x]];
      const y = bottom - below[x] * scale;
      if (x) paint.lineTo(LEFT + x, y);
      else paint.moveTo(LEFT, y);
      paint.lineTo(LEFT + x + 1, y);
    }
    paint.stroke();
  });
}

function drawOverview(area) {
  const pixels = Math.max(Math.floor(width()), 1);
  const total = totals("device");
  const most = total.reduce((a, b) => Math.max(a, b), 0) || 1;
  const at = highest(total, 0, axis.end, pixels);
  paint.fillStyle = theme("--track");
  paint.fillRect(LEFT, area.y, width(), area.height);
  paint.fillStyle = theme("--muted");
  for (let x = 0; x < pixels && count; x++) {
    const high = (total[at[x]] / most) * area.height;
    paint.fillRect(LEFT + x, area.y + area.height - high, 1, high);
  }
  const from = LEFT + (view.begin / axis.end) * width();
  const to = LEFT + (view.end / axis.end) * width();
  paint.fillStyle = theme("--shade");
  paint.fillRect(from, area.y, Math.max(to - from, 2), area.height);
  paint.strokeStyle = theme("--accent");
  paint.lineWidth = 1.5;
  paint.strokeRect(from, area.y, Math.max(to - from, 2), area.height);
}

function drawMemory(area) {
  const pixels = Math.max(Math.floor(width()), 1);
  const total = totals(area.place);
  const bottom = area.y + area.height;
  area.most = total.reduce((a, b) => Math.max(a, b), 0) * 1.08 || 1;
  paint.fillStyle = theme("--track");
  paint.fillRect(LEFT, area.y, width(), area.height);
  if (!count) return;
  paint.font = SMALL;
  paint.textAlign = "right";
  paint.textBaseline = "middle";
  const step = niceStep(area.most, area.height > 100 ? 6 : 2, 2);
  for (let bytes = 0; bytes <= area.most; bytes += step) {
    const y = bottom - (bytes / area.most) * area.height;
    paint.strokeStyle = theme("--line");
    paint.lineWidth = 1;
    line(LEFT, y, LEFT + width(), y);
    paint.fillStyle = theme("--muted");
    paint.fillText(bytes ? round(bytes) : "0", LEFT - 8, y);
  }
  area.at = highest(total, view.begin, view.end, pixels);
  fillStack(area, area.at, stacks[area.place], chosen.matching);
  if (chosen.matching) drawMatching(area);
  if (area.place === "device") drawPeak(area, total);
  if (chosen.tensor >= 0 && text(memory.place, chosen.tensor) === area.place) drawTensor(area);
}

// What of it belongs to the nodes that were searched for.
function drawMatching(area) {
  const bytes = new Float64Array(count + 1);
  for (let row = 0; row < memory.node.length; row++) {
    if (!chosen.matching[memory.node[row]] || text(memory.place, row) !== area.place) continue;
    bytes[memory.begin[row]] += memory.nbytes[row];
    bytes[memory.end[row] + 1] -= memory.nbytes[row];
  }
  for (let position = 1; position <= count; position++) bytes[position] += bytes[position - 1];
  paint.fillStyle = theme("--strong");
  const at = highest(bytes, view.begin, view.end, area.at.length);
  at.forEach((position, x) => {
    const high = (bytes[position] / area.most) * area.height;
    paint.fillRect(LEFT + x, area.y + area.height - high, 1, high);
  });
}

function drawPeak(area, total) {
  let peak = 0;
  for (let position = 1; position < count; position++) if (total[position] > total[peak]) peak = position;
  area.peak = peak;
  if (!total[peak]) return;
  const x = toX(axis.begins[peak]);
  const y = area.y + area.height - (total[peak] / area.most) * area.height;
  if (x < LEFT - 1 || x > LEFT + width() + 1) return;
  paint.strokeStyle = paint.fillStyle = theme("--peak");
  paint.lineWidth = 1.2;
  paint.setLineDash([4, 3]);
  line(LEFT, y, LEFT + width(), y);
  line(x, y, x, area.y + area.height);
  paint.setLineDash([]);
  paint.beginPath();
  paint.arc(x, y, 3.5, 0, 7);
  paint.fill();
  const words = `peak ${size(total[peak])} at ${axis.format(axis.begins[peak])}`;
  paint.font = `600 ${FONT}`;
  paint.textBaseline = "bottom";
  const fits = x + 8 + paint.measureText(words).width < LEFT + width();
  paint.textAlign = fits ? "left" : "right";
  paint.fillText(words, fits ? x + 8 : x - 8, y - 3);
}

function drawTensor(area) {
  const row = chosen.tensor;
  const from = toX(axis.begins[memory.begin[row]]);
  const last = memory.end[row] + 1;
  const to = toX(last < count ? axis.begins[last] : axis.end);
  paint.fillStyle = theme("--shade");
  paint.fillRect(from, area.y, Math.max(to - from, 2), area.height);
  paint.strokeStyle = theme("--accent");
  paint.lineWidth = 2;
  paint.strokeRect(from, area.y, Math.max(to - from, 2), area.height);
}

function line(x0, y0, x1, y1) {
  paint.beginPath();
  paint.moveTo(x0, y0);
  paint.lineTo(x1, y1);
  paint.stroke();
}

// Dark words on light colours, light ones on dark.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111111" : "#ffffff";
}

const workOf = (event) => given.works[(event.rows === spans ? given.work : given.measured.work)[event.row]];

function drawLane(area) {
  paint.fillStyle = theme("--track");
  paint.fillRect(LEFT, area.y, width(), area.height);
  const pixels = Math.ceil(width());
  const covered = new Map(); // colour -> how much of each pixel it fills
  area.drawn = 0;
  for (const event of area.events) {
    if (event.begin > view.end) break;
    if (event.end < view.begin) continue;
    const work = workOf(event);
    const colour = given.colours.work[work];
    const x0 = Math.max(toX(event.begin), LEFT);
    const x1 = Math.min(toX(event.end), LEFT + width());
    const isDim = chosen.matching && !chosen.matching[event.node];
    if (x1 - x0 < 1.5) {
      if (isDim) continue;
      if (!covered.has(colour)) covered.set(colour, new Float32Array(pixels + 2));
      const x = Math.min(Math.floor(x0 - LEFT), pixels);
      covered.get(colour)[x] += Math.max(x1 - x0, 0.15);
      continue;
    }
    area.drawn++;
    paint.globalAlpha = isDim ? 0.15 : area.isMeasured ? 0.85 : 1;
    if (work === "waiting") drawWaiting(x0, x1, area);
    else {
      paint.fillStyle = colour;
      paint.fillRect(x0, area.y, x1 - x0 > 3 ? x1 - x0 - 0.7 : x1 - x0, area.height);
    }
    if (x1 - x0 > 46 && !isDim) drawName(event, work, colour, x0, x1, area);
    paint.globalAlpha = 1;
  }
  for (const [colour, share] of covered) {
    paint.fillStyle = colour;
    share.forEach((part, x) => {
      if (!part) return;
      paint.globalAlpha = Math.min(0.35 + 0.65 * part, 1);
      paint.fillRect(LEFT + x, area.y, 1, area.height);
    });
  }
  paint.globalAlpha = 1;
}

function drawWaiting(x0, x1, area) {
  paint.save();
  paint.beginPath();
  paint.rect(x0, area.y, x1 - x0, area.height);
  paint.clip();
  paint.strokeStyle = given.colours.work.waiting;
  paint.lineWidth = 1.1;
  for (let x = Math.floor(x0 / 6) * 6 - area.height; x < x1; x += 6) line(x, area.y + area.height, x + area.height, area.y);
  paint.restore();
}

// On the link, what it is for says more than what it is: that is the colour.
function shortName(event) {
  const lane = text(event.rows.lane, event.row);
  if (lane === "compute") return text(nodes.name, event.node);
  if (nodes.bucket[event.node] >= 0) return `bucket ${nodes.bucket[event.node]}`;
  return parametersOf(event.node, 1) || text(nodes.name, event.node);
}

function drawName(event, work, colour, x0, x1, area) {
  const words = work === "waiting" ? "waits" : shortName(event);
  paint.save();
  paint.beginPath();
  paint.rect(x0, area.y, x1 - x0 - 3, area.height);
  paint.clip();
  paint.font = SMALL;
  paint.textAlign = "left";
  paint.textBaseline = "middle";
  paint.fillStyle = work === "waiting" ? theme("--text") : inkOn(colour);
  if (work === "waiting") {
    const wide = paint.measureText(words).width;
    paint.fillStyle = theme("--track");
    paint.fillRect(x0 + 3, area.y + 4, wide + 4, area.height - 8);
    paint.fillStyle = theme("--text");
  }
  paint.fillText(words, x0 + 5, area.y + area.height / 2 + 0.5);
  paint.restore();
}

function drawAxis(area) {
  const range = view.end - view.begin;
  let step = niceStep(range, Math.max(Math.floor(width() / 110), 2), 10);
  if (axis.name === "order") step = Math.max(Math.round(step), 1);
  paint.font = SMALL;
  paint.textAlign = "center";
  paint.textBaseline = "top";
  for (let value = Math.ceil(view.begin / step) * step; value <= view.end + step * 1e-6; value += step) {
    const x = toX(value);
    paint.strokeStyle = theme("--line");
    line(x, area.y - 3, x, area.y + 3);
    paint.fillStyle = theme("--muted");
    paint.fillText(axis.format(value), Math.min(Math.max(x, LEFT + 5), LEFT + width() - 12), area.y + 6);
  }
}

function drawEventFrame(event, colour) {
  if (!event) return;
  const area = page.areas.find((one) => one.events && one.events.includes(event));
  if (!area) return;
  const x0 = Math.max(toX(event.begin), LEFT);
  const x1 = Math.min(toX(event.end), LEFT + width());
  if (x1 < LEFT || x0 > LEFT + width()) return;
  paint.strokeStyle = colour;
  paint.lineWidth = 2;
  paint.strokeRect(x0 - 1, area.y - 1, Math.max(x1 - x0, 2) + 2, area.height + 2);
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  canvas.dataset.view = `${axis.name} ${view.begin} ${view.end}`;
  canvas.style.height = `${page.height}px`;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(page.height * ratio);
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.clearRect(0, 0, canvas.clientWidth, page.height);
  for (const area of page.areas) {
    if (area.what === "overview") drawOverview(area);
    if (area.what === "memory") drawMemory(area);
    if (area.what === "lane") drawLane(area);
    if (area.what === "axis") drawAxis(area);
    if (!area.label) continue;
    paint.font = area.isMeasured || area.what === "overview" ? SMALL : `600 ${FONT}`;
    paint.textAlign = "left";
    paint.textBaseline = area.what === "memory" ? "top" : "middle";
    paint.fillStyle = theme(area.isMeasured || area.what === "overview" ? "--muted" : "--text");
    const y = area.what === "memory" ? area.y : area.y + area.height / 2;
    if (area.what === "memory") area.label.split(" ").forEach((word, i) => paint.fillText(word, 10, y + 15 * i));
    else paint.fillText(area.label, area.isMeasured ? 22 : 10, y);
  }
  drawEventFrame(chosen.pin, theme("--strong"));
  drawEventFrame(chosen.hover, theme("--accent"));
  if (chosen.drag && chosen.drag.kind === "zoom") {
    paint.fillStyle = theme("--shade");
    const [from, to] = [chosen.drag.from, chosen.drag.to].sort((a, b) => a - b);
    paint.fillRect(from, page.areas[0].y, to - from, page.height);
  } else if (chosen.x !== undefined && chosen.x >= LEFT) {
    paint.strokeStyle = theme("--muted");
    paint.lineWidth = 1;
    line(chosen.x, page.areas[1].y, chosen.x, page.areas[page.areas.length - 1].y);
  }
}
