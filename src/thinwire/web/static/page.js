// The page of a run: one stream of what is known, drawn as it comes.
"use strict";

const $ = (id) => document.getElementById(id);
const runs = [];
let owner = false, chosen = 0, axis = "step", connected = false, offset = 0, invited = false;
const lossChart = new CurveChart($("loss"), 340), speedChart = new CurveChart($("speed"), 240);

function newRun() {
  return {
    points: { size: 1, step: [], tokens: [], hours: [], loss: [], speed: [] },
    valid: [], events: [], state: null, progress: {}, settings: { text: "", recipe: "" }, seats: {},
  };
}

// A browser has six connections for a host, and each open page holds one: a hidden one lets go of it.
const HIDDEN_MS = 300000;
let source = null, hiding = 0;

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => { source.close(); source = null; }, HIDDEN_MS);
  else if (!source) connect();
});

function connect() {
  source = new EventSource("/stream");
  const on = (kind, take) => source.addEventListener(kind, (event) => {
    const message = JSON.parse(event.data);
    take(message.value, runs[message.run]);
    connected = true;
    later();
  });
  on("hello", (hello) => {
    owner = hello.owner;
    offset = hello.now - Date.now() / 1000;
    runs.length = 0;
    for (let number = 0; number < hello.runs; number++) runs.push(newRun());
    chosen = Math.min(chosen, runs.length - 1);
  });
  for (const kind of ["points", "valid", "events", "progress", "settings", "state"]) on(kind, (value, run) => {
    run[kind] = value;
    dirtyStep = dirtyStep || kind === "progress";
  });
  source.onerror = () => {
    connected = false;
    later();
    if (source && source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

let due = false, dirtyStep = true;

function later() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

function now() {
  return Date.now() / 1000 + offset;
}

function draw() {
  const run = runs[chosen];
  if (!run || !run.state) return drawChip({ state: "connecting" });
  const state = run.state;
  drawTabs();
  drawHeader(run, state);
  drawTiles(run, state);
  drawCurves();
  drawPipeline(run, state);
  if (dirtyStep) drawProgress(run, state);
  drawStory(run);
  drawInvite(state);
  $("settings-card").hidden = !run.settings.text;
  if ($("settings").textContent !== run.settings.text) $("settings").textContent = run.settings.text;
}

function drawTabs() {
  $("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  $("runs").replaceChildren(...runs.map((run, number) => {
    const tab = el("button", { "aria-pressed": number === chosen, text: nameOf(run, number) });
    tab.style.borderBottom = "3px solid " + runColour(number);
    tab.onclick = () => { chosen = number; dirtyStep = true; later(); };
    return tab;
  }));
}

function nameOf(run, number) {
  return run.state ? run.state.run : "run " + number;
}

const GOOD = ["training", "complete"], BAD = ["silent", "no connection"];

function drawChip(state) {
  const word = !connected ? "no connection" : state.waiting_for ? "waiting" : state.state;
  $("chip").textContent = word;
  $("chip").className = "chip " + (GOOD.includes(word) ? "good" : BAD.includes(word) ? "bad" : "warn");
}

function drawHeader(run, state) {
  drawChip(state);
  $("name").textContent = state.run;
  $("recipe").textContent = run.settings.recipe ? "recipe " + run.settings.recipe : "";
  const share = state.steps ? state.step / state.steps : 0;
  $("bar").firstElementChild.style.width = 100 * share + "%";
  $("bar").setAttribute("aria-valuenow", Math.round(100 * share));
  document.title = state.step ? `${figure(state.loss)} · ${state.step}/${state.steps} · ${state.run}` : state.run;
  const quiet = now() - state.heard;
  $("heard").textContent = quiet > 20 ? `last word ${duration(quiet)} ago` : "";
  $("waiting").hidden = !state.waiting_for;
  $("waiting").textContent = state.waiting_for ? `Waits for ${state.waiting_for}, for ${duration(now() - state.waiting_since)}` : "";
  const thin = run.progress.simulated_step_seconds, dense = run.progress.dense_step_seconds;
  const gain = dense && thin ? (dense - thin) * state.step : 0;
  $("saved").hidden = gain < 60;
  $("saved").textContent = `Saved so far against dense cuts, simulated: ${duration(gain)} (a step of ${duration(thin)} instead of ${duration(dense)})`;
}

function drawTiles(run, state) {
  const cuts = run.progress.cuts || [], sum = (part) => cuts.reduce((all, row) => all + part(row), 0);
  const dense = sum((row) => 2 * row.bf16_bytes_per_token), sent = sum((row) => row.forward_bytes_per_token + row.backward_bytes_per_token);
  const valid = run.valid[run.valid.length - 1];
  const tiles = [
    ["loss", figure(state.loss), state.grad_norm ? `gradient norm ${figure(state.grad_norm)}` : ""],
    ["validation", valid ? figure(valid[1]) : "–", valid ? `step ${count(valid[0])}` + (valid[2] ? `, ${valid[2].toFixed(2)} bits/byte` : "") : "none yet"],
    ["step", state.step ? count(state.step) : "–", state.steps ? `of ${count(state.steps)}` : ""],
    ["tokens/s", state.tokens_per_s ? count(state.tokens_per_s) : "–", state.step_seconds ? `${duration(state.step_seconds)} a step` : ""],
    ["tokens seen", state.tokens ? count(state.tokens) : "–", state.lr ? `rate ${state.lr.toExponential(1)}` : ""],
    ["time left", state.step < state.steps && !["ended", "silent"].includes(state.state) ? duration(state.eta_seconds) : "–", state.began ? `running for ${duration(state.time - state.began)}` : ""],
    ["checkpoint", state.last_checkpoint === null ? "–" : count(state.last_checkpoint), state.last_checkpoint === null ? "none yet" : "last saved step"],
  ];
  if (sent) tiles.push(["fewer bytes", `${figure(dense / sent)}×`, `${bytes((dense - sent) * state.tokens)} not sent`]);
  $("tiles").replaceChildren(...tiles.map(([label, value, more]) => el("div", { class: "tile" },
    el("div", { class: "label", text: label }), el("div", { class: "value", text: value }), el("div", { class: "more", text: more }))));
}

function drawCurves() {
  const weight = Number($("smooth").value), raw = $("raw").checked, many = runs.length > 1;
  const losses = [], speeds = [];
  runs.forEach((run, number) => {
    const name = many ? nameOf(run, number) + " " : "", xs = run.points[axis], shade = runColour(number);
    if (raw && weight) losses.push({ label: name + "raw", colour: shade + "55", width: 1, xs, ys: run.points.loss });
    losses.push({ label: name + "loss", colour: shade, width: 2, xs, ys: smoothed(run.points.loss, weight) });
    losses.push({
      label: name + "validation", colour: many ? shade : colour("bad"), width: 1.5, dash: [5, 4], points: 7,
      xs: placed(run.valid.map((row) => row[0]), run.points, axis), ys: run.valid.map((row) => row[1]),
    });
    speeds.push({ label: name + "tokens/s", colour: shade, width: 1.5, xs, ys: run.points.speed });
  });
  const label = { step: "step", tokens: "tokens", hours: "hours" }[axis];
  lossChart.draw(losses, label);
  speedChart.draw(speeds, label);
  const size = Math.max(...runs.map((run) => run.points.size));
  $("loss-note").textContent = size > 1 ? `Each point is the mean of ${size} steps.` : "";
}

function seatsOf(state) {
  const seats = {};
  for (const peer of state.peers) for (const stage of peer.stages || []) seats[stage] = peer;
  return seats;
}

function stageNames(state) {
  const seats = seatsOf(state), names = {};
  for (const [stage, peer] of Object.entries(seats)) {
    names[stage] = peer.stages.length > 1 ? `${peer.name} ${stage}` : peer.name;
  }
  return names;
}

function drawPipeline(run, state) {
  const seats = seatsOf(state), groups = [];
  for (const stage of Object.keys(seats).map(Number).sort((a, b) => a - b)) {
    const last = groups[groups.length - 1];
    if (last && last.peer === seats[stage] && last.stages[last.stages.length - 1] === stage - 1) last.stages.push(stage);
    else groups.push({ peer: seats[stage], stages: [stage] });
  }
  const parts = [];
  groups.forEach((group, index) => {
    if (index) parts.push(linkBox(run, state, group.stages[0] - 1));
    const moved = group.stages.some((stage) => stage in run.seats && run.seats[stage] !== group.peer.name);
    parts.push(peerBox(state, group.peer, group.stages, moved));
  });
  run.seats = Object.fromEntries(Object.entries(seats).map(([stage, peer]) => [stage, peer.name]));
  place($("pipeline"), parts);
  place($("spares"), state.peers.filter((peer) => !(peer.stages || []).length).map((peer) => peerBox(state, peer, [], false)));
  const told = state.role === "member" ? "as the host tells this machine" : "";
  $("pipeline-note").textContent = [state.epoch > 1 ? `formed ${state.epoch} times` : "", told].filter(Boolean).join(", ");
}

// Boxes that stay as they are keep their place, so that what moves can be seen, and clicked.
function place(parent, boxes) {
  boxes.forEach((box, index) => {
    const old = parent.children[index];
    if (!old) parent.append(box);
    else if (old.innerHTML !== box.innerHTML || old.className.replace(" moved", "") !== box.className) old.replaceWith(box);
  });
  while (parent.children.length > boxes.length) parent.lastElementChild.remove();
}

function peerBox(state, peer, stages, moved) {
  const isAway = state.role !== "folder" && (!peer.machine || peer.state === "cannot be reached"), has = peer.machine || {}, box = el("div", { class: "peer" + (isAway ? " away" : stages.length ? " good" : "") + (moved ? " moved" : "") });
  box.dataset.peer = peer.name;
  const who = el("div", { class: "who" }, el("span", { class: "dot" }), el("span", { text: peer.name }));
  if (peer.is_this_machine) who.append(el("span", { class: "quiet", text: "this machine" }));
  for (const stage of stages.filter((one) => peer.name !== "stage " + one)) who.append(el("span", { class: "stage", text: "stage " + stage }));
  if (owner && state.role === "host" && peer.state !== "kicked" && !peer.is_this_machine) {
    const button = el("button", { text: "kick" });
    button.onclick = () => kick(peer.name);
    who.append(button);
  }
  box.append(who);
  if (peer.state) box.append(el("div", { class: "doing", text: peer.state }));
  const rows = (state.stages || []).filter((row) => stages.includes(row.stage));
  if (rows.length && !isAway) {
    const total = rows.length * state.step_seconds || 1, sum = (name) => rows.reduce((all, row) => all + row[name], 0) / total;
    box.append(splitBar([["compute", "forward", sum("compute_s")], ["update", "update", sum("update_s")], ["wait", "waiting", sum("wait_s")]]));
    box.append(el("div", { class: "quiet", text: rows.map((row) => row.layers).join(", ") }));
  }
  const facts = [has.device || (rows[0] || {}).device];
  if (has.tflops) facts.push(has.tflops >= 1 ? figure(has.tflops) + " TFLOP/s" : figure(1000 * has.tflops) + " GFLOP/s");
  if (has.mbps_up) facts.push(`${figure(has.mbps_up)}/${figure(has.mbps_down)} Mbit/s`);
  if (has.latency_ms) facts.push(`${figure(2 * has.latency_ms)} ms to the host`);
  box.append(el("div", { class: "quiet", text: facts.filter(Boolean).join(" · ") }));
  return box;
}

function linkBox(run, state, cut) {
  const box = el("div", { class: "link" }), of = (rows) => (rows || []).find((row) => row.cut === cut);
  const link = of(state.crossed), way = of(state.links) || {}, row = of(run.progress.cuts) || {};
  if (!link) return box;
  if (!link.forward_bytes && !link.backward_bytes) {
    box.append(el("div", { class: "wire" }), el("div", { text: "in one process" }));
    return box;
  }
  const isDown = way.way === "", isLive = state.state === "training" && connected && !isDown;
  box.className += isDown ? " down" : isLive ? " live" : "";
  const rate = (size) => `${bytes(size / state.step_seconds)}/s`;
  box.append(el("div", { text: "→ " + rate(link.forward_bytes) }), el("div", { class: "wire" }), el("div", { text: "← " + rate(link.backward_bytes) }));
  if (row.ratio_vs_bf16) box.append(el("b", { text: `${figure(row.ratio_vs_bf16)}× fewer bytes` }));
  const facts = [isDown ? "not connected" : way.way, way.round_trip_ms && !isDown ? `round trip ${figure(way.round_trip_ms)} ms` : "",
    link.utilisation === null ? "" : `uplink ${Math.round(100 * link.utilisation)} % busy`];
  for (const text of facts.filter(Boolean)) box.append(el("div", { text }));
  return box;
}

function drawProgress(run, state) {
  const progress = run.progress, names = stageNames(state), timeline = progress.timeline;
  dirtyStep = false;
  $("step-card").hidden = !timeline || !timeline.spans.length;
  if (!$("step-card").hidden) {
    drawStep($("gantt"), timeline, names);
    $("step-note").textContent = `step ${timeline.step}, ${duration(timeline.seconds)}`;
    legend($("gantt-legend"), [["forward", "forward"], ["backward", "backward"], ["update", "update"], ["send", "send"]]);
  }
  const shares = progress.time_shares || [];
  $("shares-card").hidden = !shares.length;
  drawShares($("shares"), shares, names);
  legend($("shares-legend"), PARTS.map(([name, kind]) => [name, kind]));
  drawPlan(progress);
}

function drawPlan(progress) {
  const rows = (progress.planned || []).map((row) => [
    `cut ${row.cut}: ${row.codecs[0] === row.codecs[1] ? row.codecs[0] : row.codecs.join(" / ")}`,
    figure(row.planned) + " B/token", figure(row.measured) + " B/token", figure(row.dense) + " B/token",
  ]);
  if (progress.simulated_step_seconds) {
    rows.push(["step", duration(progress.simulated_step_seconds), duration(progress.step_seconds_median), duration(progress.dense_step_seconds)]);
  }
  $("plan-part").hidden = !rows.length;
  const head = ["", "planned or simulated", "measured", "dense, simulated"];
  $("plan").replaceChildren(el("table", { class: "plan" },
    el("tr", {}, ...head.map((text) => el("th", { text }))),
    ...rows.map((row) => el("tr", {}, ...row.map((text) => el("td", { text }))))));
}

let told = [];

function drawStory(run) {
  if (told[0] === run.events && told[1] === run.valid) return;
  told = [run.events, run.valid];
  const shown = run.events.filter((event) => event.kind !== "sample").reverse();
  $("story").replaceChildren(...shown.map((event) => {
    const when = new Date(1000 * event.time), isToday = when.toDateString() === new Date().toDateString();
    const clock = isToday ? when.toTimeString().slice(0, 5) : when.toLocaleDateString(undefined, { month: "short", day: "numeric" });
    return el("li", { class: event.kind },
      el("time", { text: clock, title: when.toLocaleString() }),
      el("span", { text: event.text }));
  }));
  const samples = run.events.filter((event) => event.kind === "sample").slice(-5).reverse();
  $("samples-card").hidden = !samples.length;
  $("samples").replaceChildren(...samples.map((event) => {
    const [head, step] = /^step (\d+): /.exec(event.text) || ["", 0];
    const valid = run.valid.find((row) => row[0] === Number(step));
    return el("div", { class: "sample" },
      el("div", { class: "quiet", text: `step ${count(Number(step))}` + (valid ? `, validation ${figure(valid[1])}` : "") }),
      document.createTextNode(event.text.slice(head.length)));
  }));
}

async function ask(path, body) {
  const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  const answer = await fetch(path, options).then((response) => response.json()).catch(() => ({ error: "the run does not answer" }));
  if (answer.error) throw new Error(answer.error);
  return answer;
}

function drawInvite(state) {
  const mayInvite = owner && state.role === "host";
  $("invite-card").hidden = !mayInvite;
  if (!mayInvite || invited) return;
  invited = true;
  ask(`/invite/${chosen}`).then(showInvite).catch(() => { invited = false; });
}

function showInvite(answer) {
  $("invite-line").textContent = answer.line;
  $("qr").src = answer.qr;
}

function confirmed(question) {
  $("question").textContent = question;
  $("ask").returnValue = "";
  $("ask").showModal();
  return new Promise((resolve) => { $("ask").onclose = () => resolve($("ask").returnValue === "yes"); });
}

async function kick(name) {
  if (!await confirmed(`Remove ${name} from the run? It is not let in again, and its stages move to another peer.`)) return;
  await ask(`/kick/${chosen}`, { peer: name }).then((answer) => toast(answer.text)).catch((error) => toast(error.message));
}

async function anotherInvite() {
  if (!await confirmed("Make another invite, for one machine more?")) return;
  await ask(`/invite/${chosen}`, { machines: 1 }).then(showInvite).catch((error) => toast(error.message));
}

async function copyInvite() {
  const text = $("invite-line").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that is not on loopback may not, so the old way
    const field = el("textarea", {});
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  toast("copied: others paste it into their terminal");
}

let toastTimer = 0;

function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, 5000);
}

$("axis").onclick = (event) => {
  if (!event.target.dataset.axis) return;
  axis = event.target.dataset.axis;
  for (const button of $("axis").children) button.setAttribute("aria-pressed", button === event.target);
  later();
};
$("smooth").oninput = later;
$("raw").onchange = later;
$("copy").onclick = copyInvite;
$("more-invites").onclick = anotherInvite;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  lossChart.forget();
  speedChart.forget();
  dirtyStep = true;
  later();
});
addEventListener("resize", () => { dirtyStep = true; later(); });
setInterval(later, 1000);
connect();
