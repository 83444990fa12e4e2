// Charts: the curves (by uPlot), one step on a time scale, and how stages spend their time.
"use strict";

const COLOURS = 6;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function runColour(number) {
  return colour("run" + (number % COLOURS));
}

// What is usual in the field: an exponential mean, without the pull of its start.
function smoothed(values, weight) {
  let mean = 0, known = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

// Where validations stand on another axis than steps: between the points around them.
function placed(steps, points, axis) {
  if (axis === "step") return steps;
  const xs = points.step, ys = points[axis];
  return steps.map((step) => {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < step) low = middle + 1; else high = middle;
    }
    if (low >= xs.length) return ys[ys.length - 1] ?? 0;
    const before = low ? [xs[low - 1], ys[low - 1]] : [0, 0];
    const width = xs[low] - before[0];
    return width ? before[1] + (ys[low] - before[1]) * (step - before[0]) / width : ys[low];
  });
}

class CurveChart {
  constructor(place, height) {
    this.place = place;
    this.height = height;
    this.plot = null;
    this.shape = "";
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(place);
  }

  size() {
    return { width: Math.max(200, this.place.clientWidth), height: this.height };
  }

  // series: {label, colour, width, dash, points, xs, ys}; one table for each, joined on x.
  draw(series, xLabel) {
    const shown = series.filter((one) => one.xs.length);
    if (!shown.length) return;
    const tables = shown.map((one) => [one.xs, one.ys]);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const shape = JSON.stringify([xLabel, shown.map((one) => [one.label, one.colour, one.width])]);
    if (this.plot && this.shape === shape) {
      this.plot.setData(data);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.shape = shape;
    const axis = {
      stroke: colour("quiet"), font: "12px system-ui", grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line"), width: 1 },
    };
    this.plot = new uPlot({
      ...this.size(),
      scales: { x: { time: false } },
      cursor: { points: { size: 7 } },
      axes: [
        { ...axis, values: (_, marks) => marks.map((mark) => count(mark)) },
        { ...axis, size: 58, values: (_, marks) => marks.map((mark) => figure(mark)) },
      ],
      series: [
        { label: xLabel, value: (_, value) => value === null ? "–" : count(value) },
        ...shown.map((one) => ({
          label: one.label, stroke: one.colour, width: one.width, dash: one.dash, spanGaps: false,
          points: { show: Boolean(one.points), size: one.points || 0, fill: one.colour },
          value: (_, value) => value === null || value === undefined ? "–" : figure(value),
        })),
      ],
    }, data, this.place);
  }

  forget() {  // the theme has changed: colours are read again
    this.shape = "";
  }
}

function figure(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return count(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : String(+value.toFixed(3));
}

function count(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return +(value / size).toFixed(2) + letter;
  }
  return String(+value.toFixed(2));
}

function bytes(value) {
  if (!isFinite(value)) return "–";
  for (const [size, unit] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return (value / size).toFixed(1) + " " + unit;
  }
  return value.toFixed(0) + " B";
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  const total = Math.max(0, Math.round(seconds));
  const units = [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]];
  for (const [large, small, whole, part] of units) {
    if (total >= whole) {
      return Math.floor(total / whole) + large + " " + String(Math.floor(total % whole / part)).padStart(2, "0") + small;
    }
  }
  return seconds < 10 && seconds > 0 ? seconds.toFixed(2) + "s" : total + "s";
}

const SVG = "http://www.w3.org/2000/svg";

function shape(kind, values, text) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(values)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const LANES = { F: "forward", B: "backward", W: "backward", U: "update" };

// One step of all stages on one time scale: what each computes, and under it what it sends.
function drawStep(place, timeline, names) {
  const width = Math.max(280, place.clientWidth), left = width < 500 ? 52 : 96, row = 44;
  const spans = timeline.spans, stages = timeline.stages.length;
  const first = Math.min(0, ...spans.map((span) => span.start));
  const last = Math.max(timeline.seconds, ...spans.map((span) => span.end));
  const at = (time) => left + (time - first) / (last - first || 1) * (width - left - 8);
  const height = stages * row + 22;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "one step of all stages" });
  for (let stage = 0; stage < stages; stage++) {
    const y = stage * row;
    svg.append(shape("text", { x: 0, y: y + 19 }, (names[stage] || "stage " + stage).slice(0, width < 500 ? 7 : 13)));
    svg.append(shape("rect", { class: "lane", x: left, y: y + 4, width: width - left - 8, height: 22, rx: 3 }));
  }
  for (const span of spans) {
    const x = at(span.start), wide = Math.max(0.7, at(span.end) - x), y = span.stage * row;
    const isSend = span.lane === "send";
    if (span.lane === "wait") continue;
    const kind = isSend ? "send" : LANES[span.label[0]] || "update";
    const box = shape("rect", { class: kind, x, width: wide, y: y + (isSend ? 29 : 4), height: isSend ? 7 : 22, rx: 1.5 });
    box.append(shape("title", {}, `${span.label}: ${duration(span.end - span.start)} at ${span.start.toFixed(3)} s`));
    svg.append(box);
    const number = span.label.slice(1);
    if (!isSend && number && wide > 7 * number.length + 3) {
      svg.append(shape("text", { class: "number", x: x + wide / 2, y: y + 19, "text-anchor": "middle" }, number));
    }
  }
  const marks = width < 500 ? 3 : 6;
  for (let mark = 0; mark <= marks; mark++) {
    const time = first + (last - first) * mark / marks;
    svg.append(shape("line", { x1: at(time), x2: at(time), y1: 0, y2: stages * row }));
    svg.append(shape("text", { x: at(time), y: height - 6, "text-anchor": mark === marks ? "end" : mark ? "middle" : "start" }, time.toFixed(time < 10 ? 2 : 1) + " s"));
  }
  place.replaceChildren(svg);
}

const PARTS = [
  ["compute", "forward", (share) => share.compute],
  ["update", "update", (share) => share.update],
  ["waits for a neighbour", "neighbour", (share) => share.wait_for.neighbour],
  ["waits for a link", "onlink", (share) => share.wait_for.link],
  ["waits for basis or verdict", "verdict", (share) => share.wait_for.basis + share.wait_for.verdict],
];

function splitBar(parts) {
  const bar = el("div", { class: "split" });
  for (const [name, kind, part] of parts) {
    const piece = el("i", { class: kind, title: `${name}: ${Math.round(100 * part)} %` });
    piece.style.width = 100 * Math.max(0, part) + "%";
    bar.append(piece);
  }
  return bar;
}

function drawShares(place, shares, names) {
  place.replaceChildren(...shares.map((share) => el("div", { class: "row" },
    el("span", { text: names[share.stage] || "stage " + share.stage }),
    splitBar(PARTS.map(([name, kind, of]) => [name, kind, of(share) || 0])))));
}

function legend(place, entries) {
  place.replaceChildren(...entries.map(([name, kind]) => el("span", {}, el("i", { class: kind }), document.createTextNode(name))));
}

// An element with text and classes; what others wrote comes in as text alone.
function el(tag, values, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name === "text") made.textContent = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
