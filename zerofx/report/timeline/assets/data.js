// The step's record, decoded: columns by name, bytes by kind at every node, and where things lie.

const given = JSON.parse(document.getElementById("record").textContent);
const record = given.record;
const texts = record.texts;
const nodes = record.nodes;
const spans = record.spans;
const memory = record.memory;
const count = nodes.name.length;

const text = (column, row) => texts[column[row]];

const threeDigits = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);

function size(bytes) {
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  for (const [unit, scale] of units) {
    if (bytes >= scale) return `${threeDigits(bytes / scale)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function duration(seconds) {
  const digits = (value) => String(Number(value.toPrecision(4)));
  if (seconds <= 0) return "0";
  if (seconds >= 1) return `${digits(seconds)} s`;
  if (seconds >= 1e-3) return `${digits(seconds * 1e3)} ms`;
  return `${digits(seconds * 1e6)} µs`;
}

// Bytes of each kind while each node runs, from the bottom of the stack to its top.
function stacked(place) {
  const layers = [];
  for (const kind of given.kinds[place]) {
    const bytes = new Float64Array(count + 1);
    for (let row = 0; row < memory.node.length; row++) {
      if (text(memory.place, row) !== place || text(memory.kind, row) !== kind) continue;
      bytes[memory.begin[row]] += memory.nbytes[row];
      bytes[memory.end[row] + 1] -= memory.nbytes[row];
    }
    let total = 0;
    let most = 0;
    for (let position = 0; position < count; position++) {
      total += bytes[position];
      bytes[position] = total;
      most = Math.max(most, total);
    }
    if (most > 0) layers.push({ kind, bytes, colour: given.colours.kinds[kind] });
  }
  return layers;
}

const stacks = { device: stacked("device"), host: stacked("host") };
const hidden = new Set();

function totals(place) {
  const sum = new Float64Array(count);
  for (const layer of stacks[place]) {
    if (hidden.has(layer.kind)) continue;
    for (let position = 0; position < count; position++) sum[position] += layer.bytes[position];
  }
  return sum;
}

// What is drawn along the horizontal axis: seconds, or one step per node of the program.
function firstAfter(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function laneEvents(rows, where) {
  const lanes = new Map();
  for (let row = 0; row < rows.node.length; row++) {
    const name = text(rows.lane, row);
    const lane = name === "waiting" ? "compute" : name;
    if (!lanes.has(lane)) lanes.set(lane, []);
    const [begin, end] = where(rows, row);
    lanes.get(lane).push({ begin, end, row, node: rows.node[row], rows });
  }
  for (const events of lanes.values()) events.sort((a, b) => a.begin - b.begin || a.row - b.row);
  return lanes;
}

function axisOfTime() {
  const where = (rows, row) => [rows.begin_s[row], rows.end_s[row]];
  return {
    name: "time", begins: Float64Array.from(nodes.issued_s), end: given.end_s, format: duration,
    lanes: laneEvents(spans, where),
    measured: given.measured ? laneEvents(given.measured, where) : new Map(),
  };
}

function axisOfOrder() {
  const issued = nodes.issued_s;
  const place = (seconds) => {
    const next = firstAfter(issued, seconds);
    if (next === 0) return 0;
    const from = issued[next - 1];
    const to = next < count ? issued[next] : given.end_s;
    return next - 1 + (to > from ? Math.min((seconds - from) / (to - from), 1) : 0);
  };
  const where = (rows, row) => {
    const own = text(rows.lane, row) === "compute" || text(rows.lane, row) === "waiting";
    if (own) return [rows.node[row], rows.node[row] + 1];
    const begin = place(rows.begin_s[row]);
    return [begin, Math.max(place(rows.end_s[row]), begin + 0.2)];
  };
  return {
    name: "order", begins: Float64Array.from({ length: count }, (_, i) => i), end: Math.max(count, 1),
    format: (value) => `#${Math.round(value)}`, lanes: laneEvents(spans, where), measured: new Map(),
  };
}

// ``train.py:12 loss.backward()``: with the file's name alone.
function shortSource(node) {
  const source = text(nodes.source, node);
  const place = (source.match(/^.*?:\d+(?=[: ]|$)/) || [""])[0];
  return place.slice(Math.max(place.lastIndexOf("/"), place.lastIndexOf("\\")) + 1) + source.slice(place.length);
}

function parametersOf(node, most) {
  const names = nodes.parameters[node].map((index) => record.parameters[index]);
  let words = names.slice(0, most).join(", ");
  if (names.length > most) words += ` and ${names.length - most} more`;
  if (nodes.bucket[node] < 0) return words;
  return words ? `bucket ${nodes.bucket[node]}: ${words}` : `bucket ${nodes.bucket[node]}`;
}

// Rows of memory that is there while a node runs, the largest first.
function aliveAt(position, place, kind) {
  const there = [];
  for (let row = 0; row < memory.node.length; row++) {
    if (memory.begin[row] > position || memory.end[row] < position) continue;
    if (text(memory.place, row) !== place || (kind && text(memory.kind, row) !== kind)) continue;
    there.push(row);
  }
  return there.sort((a, b) => memory.nbytes[b] - memory.nbytes[a] || memory.begin[a] - memory.begin[b]);
}

function nodesMatching(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return null;
  const found = new Uint8Array(count);
  for (let node = 0; node < count; node++) {
    const about = [text(nodes.name, node), text(nodes.operator, node), parametersOf(node, 1e9), text(nodes.source, node)];
    const line = about.join(" ").toLowerCase();
    if (wanted.every((word) => line.includes(word))) found[node] = 1;
  }
  return found;
}
