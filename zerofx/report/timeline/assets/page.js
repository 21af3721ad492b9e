// What the reader does: hovers, clicks, zooms, searches.

const tip = document.getElementById("tip");
const pinned = document.getElementById("pinned");
let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    draw();
  });
}

function show(begin, end) {
  const least = axis.name === "time" ? axis.end / 1e7 : 2;
  const wide = Math.min(Math.max(end - begin, least), axis.end);
  view.begin = Math.min(Math.max(begin + (end - begin - wide) / 2, 0), axis.end - wide);
  view.end = view.begin + wide;
  redraw();
}

function zoom(factor, around) {
  const at = around === undefined ? (view.begin + view.end) / 2 : around;
  show(at - (at - view.begin) * factor, at + (view.end - at) * factor);
}

function pan(share) {
  const by = share * (view.end - view.begin);
  show(view.begin + by, view.end + by);
}

function showAround(position) {
  const wide = Math.min((view.end - view.begin) / 4, axis.end / 8);
  show(axis.begins[position] - wide / 2, axis.begins[position] + wide / 2);
}

// Words about what is under the pointer

function element(name, content, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function swatch(colour) {
  const made = element("span", undefined, "swatch");
  made.style.background = colour;
  return made;
}

function described(heading, colour, entries) {
  const made = document.createDocumentFragment();
  const title = element("b");
  if (colour) title.append(swatch(colour));
  title.append(heading);
  made.append(title);
  const list = element("dl");
  for (const [name, value, entryColour, isCode] of entries) {
    if (value === "" || value === undefined) continue;
    list.append(element("dt", name));
    const entry = element("dd");
    if (entryColour) entry.append(swatch(entryColour));
    entry.append(isCode ? element("code", value) : value);
    list.append(entry);
  }
  made.append(list);
  return made;
}

function aboutNode(node) {
  return [
    ["operator", `${text(nodes.operator, node)}${text(nodes.value, node) ? ` → ${text(nodes.value, node)}` : ""}`],
    ["for", parametersOf(node, 6)],
    ["by pass", text(nodes.why, node)],
    ["your line", text(nodes.source, node), undefined, true],
  ];
}

function aboutEvent(event, merged) {
  const rows = event.rows;
  const seconds = rows.end_s[event.row] - rows.begin_s[event.row];
  const bytes = rows.nbytes[event.row];
  const node = event.node;
  const work = workOf(event);
  const lane = text(rows.lane, event.row);
  const entries = [
    ["takes", `${duration(seconds)}, from ${duration(rows.begin_s[event.row])} in ${rows === spans ? "predicted" : "measured"} time`],
    ["lane", `${lane} (${work})`],
  ];
  if (bytes) entries.push(["carries", `${size(bytes)}, ${size(bytes / seconds)}/s`]);
  const start = nodes.waits_for[node];
  if (lane === "waiting" && start >= 0) entries.push(["waits for", `${text(nodes.name, start)}, issued at ${duration(nodes.issued_s[start])}`]);
  entries.push(...aboutNode(node));
  if (merged > 1) entries.push(["", `and ${merged - 1} more here: zoom in to see them`]);
  return described(text(nodes.name, node), given.colours.work[work], entries);
}

function aboutMoment(position, place, kind) {
  const layers = stacks[place].filter((layer) => layer.bytes[position] > 0);
  const sum = layers.reduce((total, layer) => total + layer.bytes[position], 0);
  const entries = layers.map((layer) => [layer.kind, size(layer.bytes[position]), layer.colour]).reverse();
  const largest = aliveAt(position, place, kind).slice(0, 3);
  for (const row of largest) {
    const of = parametersOf(memory.node[row], 1);
    entries.push([
      row === largest[0] ? `largest${kind ? ` ${kind}` : ""}` : "",
      `${size(memory.nbytes[row])} ${text(memory.value, row)} of ${text(nodes.name, memory.node[row])}${of ? ` (${of})` : ""}`,
    ]);
  }
  entries.push(["while", `${text(nodes.name, position)} runs (${text(nodes.phase, position)})`]);
  entries.push(["your line", text(nodes.source, position), undefined, true]);
  const where = place === "host" ? " on the host" : "";
  return described(`${size(sum)}${where} at ${duration(nodes.issued_s[position])}`, undefined, entries);
}

function areaAt(y) {
  return page.areas.find((area) => y >= area.y - 2 && y <= area.y + area.height + 2);
}

// The longest of the events under a pixel, and how many there are.
function eventAt(area, x) {
  const from = toValue(x - 1.5);
  const to = toValue(x + 1.5);
  let best = null;
  let merged = 0;
  for (const event of area.events) {
    if (event.begin > to) break;
    if (event.end < from || (chosen.matching && !chosen.matching[event.node])) continue;
    merged++;
    if (!best || event.end - event.begin > best.end - best.begin) best = event;
  }
  return [best, merged];
}

function kindAt(area, position, y) {
  let bytes = ((area.y + area.height - y) / area.height) * area.most;
  for (const layer of stacks[area.place]) {
    if (hidden.has(layer.kind)) continue;
    bytes -= layer.bytes[position];
    if (bytes <= 0) return layer.kind;
  }
  return undefined;
}

function pointed(x, y) {
  const area = areaAt(y);
  chosen.hover = null;
  if (!area || x < LEFT || x > LEFT + width()) return null;
  if (area.what === "lane") {
    const [event, merged] = eventAt(area, x);
    chosen.hover = event;
    return event ? { event, content: () => aboutEvent(event, merged) } : null;
  }
  if (area.what !== "memory" || !count) return null;
  const position = area.at[Math.min(Math.floor(x - LEFT), area.at.length - 1)];
  const kind = kindAt(area, position, y);
  return { position, place: area.place, content: () => aboutMoment(position, area.place, kind) };
}

function placeTip(x, y) {
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(Math.min(y + 16, window.innerHeight - box.height - 6), 4)}px`;
}

canvas.addEventListener("pointermove", (event) => {
  const [x, y] = [event.offsetX, event.offsetY];
  if (chosen.drag) {
    chosen.drag.to = Math.min(Math.max(x, LEFT), LEFT + width());
    if (chosen.drag.kind === "window") moveWindow(x);
    redraw();
    return;
  }
  chosen.x = x;
  const found = pointed(x, y);
  tip.replaceChildren();
  if (found) {
    tip.append(found.content());
    placeTip(event.clientX, event.clientY);
  } else tip.style.display = "none";
  redraw();
});

canvas.addEventListener("pointerleave", () => {
  chosen.hover = null;
  chosen.x = undefined;
  tip.style.display = "none";
  redraw();
});

function moveWindow(x) {
  const wide = view.end - view.begin;
  const middle = ((x - LEFT) / width()) * axis.end;
  show(middle - wide / 2, middle + wide / 2);
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.offsetX < LEFT) return;
  const area = areaAt(event.offsetY);
  const isWindow = area && area.what === "overview";
  chosen.drag = { kind: isWindow ? "window" : "zoom", from: event.offsetX, to: event.offsetX };
  if (isWindow) moveWindow(event.offsetX);
  canvas.setPointerCapture(event.pointerId);
  tip.style.display = "none";
});

canvas.addEventListener("pointerup", (event) => {
  const drag = chosen.drag;
  chosen.drag = null;
  if (!drag || drag.kind === "window") return;
  if (Math.abs(drag.to - drag.from) > 5) {
    const [from, to] = [drag.from, drag.to].sort((a, b) => a - b).map(toValue);
    show(from, to);
  } else pin(pointed(event.offsetX, event.offsetY));
  redraw();
});

canvas.addEventListener("dblclick", () => show(0, axis.end));

canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.003), toValue(event.offsetX));
  } else if (event.shiftKey || event.deltaX) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / width());
  }
}, { passive: false });

function pin(found) {
  pinned.replaceChildren();
  chosen.pin = found && found.event ? found.event : null;
  if (!found) return;
  pinned.append(found.content());
  if (found.position !== undefined) tabulate(found.position, found.place);
}

// The table of what is in memory at a moment: the peak, until another is clicked.

const caption = document.getElementById("moment");
const rows = document.getElementById("tensors");
const back = document.getElementById("back");

function spanOf(row) {
  if (memory.begin[row] === 0 && memory.end[row] === count - 1) return "always";
  return `${duration(nodes.issued_s[memory.begin[row]])} – ${duration(nodes.issued_s[memory.end[row]])}`;
}

function tabulate(position, place) {
  const there = aliveAt(position, place);
  const on = place === "host" ? " on the host" : "";
  const shown = there.slice(0, given.largest);
  caption.textContent = `At ${duration(nodes.issued_s[position])}, while ${text(nodes.name, position)} runs: the ${shown.length} largest of ${there.length} tensors${on}`;
  rows.replaceChildren(...shown.map((row) => {
    const node = memory.node[row];
    const line = element("tr");
    line.append(element("td", size(memory.nbytes[row]), "size"));
    const kind = element("td", undefined, "nowrap");
    kind.append(swatch(given.colours.kinds[text(memory.kind, row)]), text(memory.kind, row));
    line.append(kind);
    const cell = (words, className) => {
      const made = element("td", undefined, className);
      made.append(element("code", words));
      return made;
    };
    line.append(cell(text(memory.value, row), "nowrap"), cell(text(nodes.name, node)), element("td", parametersOf(node, 3)));
    line.append(element("td", spanOf(row), "nowrap"), cell(shortSource(node)));
    line.title = text(nodes.source, node);
    line.addEventListener("pointerenter", () => {
      chosen.tensor = row;
      redraw();
    });
    line.addEventListener("pointerleave", () => {
      chosen.tensor = -1;
      redraw();
    });
    return line;
  }));
  back.hidden = position === given.peak && place === "device";
}

back.addEventListener("click", () => tabulate(given.peak, "device"));

// The bar above the chart, and the legend

function press(id, action) {
  document.getElementById(id).addEventListener("click", action);
}

press("in", () => zoom(0.5));
press("out", () => zoom(2));
press("all", () => show(0, axis.end));
press("to-peak", () => {
  if (given.peak < 0) return;
  showAround(given.peak);
  tabulate(given.peak, "device");
});

function useAxis(name) {
  const middle = Math.max(firstAfter(axis.begins, (view.begin + view.end) / 2) - 1, 0);
  const share = (view.end - view.begin) / axis.end;
  axis = axes[name];
  for (const one of ["time", "order"]) document.getElementById(`by-${one}`).setAttribute("aria-pressed", String(one === name));
  page = layout();
  const wide = share * axis.end;
  const at = count ? axis.begins[middle] : 0;
  show(share > 0.999 ? 0 : at - wide / 2, share > 0.999 ? axis.end : at + wide / 2);
}

press("by-time", () => useAxis(given.end_s > 0 ? "time" : "order"));
press("by-order", () => useAxis("order"));

const search = document.getElementById("search");
const found = document.getElementById("found");

search.addEventListener("input", () => {
  chosen.matching = nodesMatching(search.value);
  found.textContent = "";
  if (chosen.matching) {
    const number = chosen.matching.reduce((a, b) => a + b, 0);
    found.textContent = `${number} node${number === 1 ? "" : "s"}; their memory is drawn solid`;
  }
  redraw();
});

for (const key of document.querySelectorAll("button[data-kind]")) {
  key.addEventListener("click", () => {
    const kind = key.dataset.kind;
    if (hidden.has(kind)) hidden.delete(kind);
    else hidden.add(kind);
    key.setAttribute("aria-pressed", String(!hidden.has(kind)));
    redraw();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.target === search) {
    if (event.key === "Escape") search.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, axis.end),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "/": () => search.focus(), Escape: () => pin(null),
    p: () => document.getElementById("to-peak").click(),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
  redraw();
});

window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (given.peak >= 0) tabulate(given.peak, "device");
draw();
document.body.dataset.ready = "yes";
