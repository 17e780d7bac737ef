// The Workbench: one request, its answer as it comes, and a study of steering by the difference of two prompts.

import { ApiFault, complete, models, stream } from "./api.js";
import { asCurl, asPython, steeringAsPython } from "./code.js";
import { difference, norm, residualStream, steeringVector, vectorOf } from "./tensors.js";
import { TokenView } from "./tokens.js";

const page = document.getElementById("workbench");
const form = document.getElementById("request");
const field = (name) => form.elements.namedItem(name);
const find = (id) => document.getElementById(id);
// Larger captures are of the chosen layer alone.
const VALUES_A_TOKEN_AT_MOST = 200_000;
const MAX_LOGPROBS = 20;

const known = new Map();
let running = null; // the AbortController of what runs
let study = null; // the prompts of the vector, where it is read, and its difference at each captured layer
let shownSeed = null;
let baseShown = null; // the request whose whole answer stands in the first column

// The request

function numberOf(name) {
  const text = field(name).value.trim();
  return text === "" ? undefined : Number(text);
}

// A blank seed is drawn here and sent, so that every run can be run again.
function requestBody({ seed }) {
  const stop = field("stop").value.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
  const logprobs = numberOf("logprobs");
  const body = {
    model: field("model").value,
    prompt: field("prompt").value,
    max_tokens: numberOf("max_tokens"),
    temperature: numberOf("temperature"),
    top_p: numberOf("top_p"),
    n: numberOf("n"),
    seed,
    logprobs: logprobs === undefined ? undefined : Math.min(logprobs, MAX_LOGPROBS),
    stop: stop.length ? stop : undefined,
  };
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined));
}

function bodyNow() {
  return requestBody({ seed: numberOf("seed") ?? shownSeed ?? undefined });
}

const drawnSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] % 1_000_000;

function steeringNow() {
  if (!study || !field("steer").checked) return null;
  const layer = Number(field("layer").value);
  const vector = study.vectors.get(layer);
  if (!vector) return null;
  return { layer, scale: Number(field("scale").value), normMatch: field("norm_match").checked, vector };
}

const steered = (body, { vector, layer, scale, normMatch }) => {
  const { n, ...one } = body; // a steered request has one choice
  return { ...one, apply_steering_vectors: [steeringVector(vector, layer, scale, normMatch)] };
};

// What a person is told

function say(text) {
  find("state").textContent = text;
}

function showFault(error) {
  const box = find("fault");
  box.replaceChildren();
  for (const name of ["model", "prompt", "max_tokens", "temperature", "top_p", "n", "seed", "logprobs", "stop"]) {
    field(name).removeAttribute("aria-invalid");
  }
  box.hidden = !error;
  if (!error) return;
  const code = document.createElement("code");
  code.textContent = error.code ?? "";
  box.append(error.message, " ", code);
  const named = error.param ? form.elements.namedItem(error.param.split(".")[0]) : null;
  if (named) {
    named.setAttribute("aria-invalid", "true");
    named.focus();
  }
}

function setRunning(controller) {
  running = controller;
  find("stop-run").disabled = !controller;
  find("run").disabled = Boolean(controller);
  page.setAttribute("aria-busy", String(Boolean(controller)));
}

// Runs `work(signal)` until it ends, is stopped or fails; one at a time.
async function run(work) {
  running?.abort();
  const controller = new AbortController();
  setRunning(controller);
  showFault(null);
  try {
    await work(controller.signal);
  } catch (error) {
    controller.abort();
    if (error.name === "AbortError") {
      if (running === controller) say("Stopped. What was generated until then is charged.");
    } else {
      say("");
      if (!find("output").querySelector(".token")) find("output").hidden = true;
      showFault(error instanceof ApiFault ? error : new ApiFault(String(error)));
    }
  } finally {
    if (running === controller) setRunning(null);
  }
}

// Answers

// Streams `body` into the column `name`, and says there how it went.
async function answerInto(name, body, signal) {
  const column = find(name);
  const label = column.querySelector("h2").textContent;
  const views = Array.from({ length: body.n ?? 1 }, (_, index) => new TokenView({
    label: body.n > 1 ? `${label} ${index + 1}` : label,
    onContinue: (text) => {
      field("prompt").value += text;
      form.requestSubmit();
    },
  }));
  column.querySelector(".choices").replaceChildren(...views.map((view) => view.element));
  const figures = column.querySelector(".figures");
  figures.textContent = "";
  const began = performance.now();
  let usage = null;
  const reasons = new Set();
  for await (const chunk of stream(body, signal)) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      views[choice.index].add(choice.text, choice.logprobs);
      if (choice.finish_reason) reasons.add(choice.finish_reason);
    }
  }
  const seconds = (performance.now() - began) / 1000;
  const tokens = usage.completion_tokens;
  const why = reasons.has("length") ? "ended at max_tokens" : "ended by itself";
  figures.textContent = `${usage.prompt_tokens} + ${tokens} tokens, ${(tokens / seconds).toFixed(0)} a second, ${why}`;
}

// With `again`, by the last seed, and beside the base that is there where it is of the same request.
async function runAll({ again = false } = {}) {
  const steering = steeringNow();
  const seed = numberOf("seed") ?? (again ? shownSeed : null) ?? drawnSeed();
  shownSeed = seed;
  const body = requestBody({ seed });
  const base = steering ? { ...body, n: 1 } : body;
  const keepsBase = again && baseShown === JSON.stringify(base);
  if (!keepsBase) baseShown = null;
  find("steered").hidden = !steering;
  find("base").querySelector("h2").textContent = steering ? "Base" : "Completion";
  find("output").hidden = false;
  showCode();
  say("Running…");
  await run(async (signal) => {
    const work = [];
    if (!keepsBase) work.push(answerInto("base", base, signal).then(() => { baseShown = JSON.stringify(base); }));
    if (steering) work.push(answerInto("steered", steered(body, steering), signal));
    await Promise.all(work);
    find("again").hidden = false;
    find("again").textContent = `Run again with seed ${seed}`;
    say(`Done, with seed ${seed}.`);
  });
}

// Steering

async function capture() {
  const model = known.get(field("model").value);
  const { n_layers: layers, hidden_size: hidden } = model.capabilities;
  const chosen = Number(field("layer").value);
  const wanted = layers * hidden <= VALUES_A_TOKEN_AT_MOST ? Array.from({ length: layers }, (_, layer) => layer) : [chosen];
  const texts = { toward: field("toward").value, away: field("away").value };
  const where = field("where").value;
  say("Reading both prompts…");
  await run(async (signal) => {
    const ask = { model: model.id, max_tokens: 1, temperature: 0, output_residual_stream: wanted };
    const [toward, away] = (await Promise.all(
      [texts.toward, texts.away].map((prompt) => complete({ ...ask, prompt }, signal)),
    )).map((answer) => residualStream(answer.activations.residual_stream));
    const vectors = new Map(wanted.map((layer, row) => [
      layer, difference(vectorOf(toward, row, where), vectorOf(away, row, where)),
    ]));
    const share = new Map(wanted.map((layer, row) => [
      layer, norm(vectors.get(layer)) / (norm(vectorOf(toward, row, where)) || 1),
    ]));
    study = { ...texts, where, vectors, share };
    field("steer").checked = true;
    field("steer").disabled = false;
    showStudy();
    showCode();
    say(`Read ${toward.tokens} and ${away.tokens} tokens. Move the scale to steer.`);
  });
}

function showStudy() {
  const layer = Number(field("layer").value);
  find("layer-now").textContent = layer;
  find("scale-now").textContent = Number(field("scale").value).toFixed(1);
  const box = find("differences");
  box.hidden = !study;
  if (!study) return;
  const most = Math.max(...study.share.values(), 1e-9);
  box.querySelector(".bars").replaceChildren(...[...study.share].map(([one, value]) => {
    const bar = document.createElement("button");
    bar.type = "button";
    bar.style.setProperty("--height", (value / most).toFixed(3));
    bar.title = `layer ${one}: the difference is ${(value * 100).toFixed(0)} % of the first prompt's norm`;
    bar.setAttribute("aria-label", bar.title);
    bar.setAttribute("aria-pressed", String(one === layer));
    bar.addEventListener("click", () => { field("layer").value = one; onSteeringChange(); });
    return bar;
  }));
  find("no-layer").hidden = study.vectors.has(layer);
}

function forgetStudy() {
  study = null;
  field("steer").checked = false;
  field("steer").disabled = true;
  showStudy();
  showCode();
}

// A moved slider steers again, beside the base that is there already, with its seed.
function onSteeringChange() {
  showStudy();
  showCode();
  if (steeringNow()) runAll({ again: true });
}

// As code

function showCode() {
  const steering = steeringNow();
  const body = steering ? { ...bodyNow(), n: undefined } : bodyNow();
  const plain = JSON.parse(JSON.stringify(body));
  find("curl").querySelector("code").textContent = asCurl(steering ? steered(plain, steering) : plain);
  find("python").querySelector("code").textContent = steering
    ? steeringAsPython(plain, { ...steering, toward: study.toward, away: study.away, where: study.where })
    : asPython(plain);
}

function selectTab(tab) {
  for (const one of tab.parentElement.querySelectorAll("[role=tab]")) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", String(isChosen));
    one.tabIndex = isChosen ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
}

// The page

function showModel() {
  const model = known.get(field("model").value);
  if (!model) return;
  const { n_layers: layers, max_model_len: context, hidden_size: hidden } = model.capabilities;
  find("model-facts").textContent = `${model.served_model_name}: ${layers} layers of ${hidden}, context ${context.toLocaleString("en")} tokens`;
  const badge = find("model-status");
  badge.textContent = model.status;
  badge.className = `badge ${model.status}`;
  badge.hidden = false;
  field("layer").max = layers - 1;
  field("layer").value = Math.floor(layers / 2);
}

async function showModels() {
  const list = await models();
  for (const model of list) known.set(model.id, model);
  const wanted = new URLSearchParams(location.search).get("model");
  field("model").replaceChildren(...list.map((model) => new Option(model.id, model.id, false, model.id === wanted)));
  if (list.length === 0) {
    find("run").disabled = find("capture").disabled = true;
    throw new ApiFault("There is no Base model just now: an operator adds one or switches one on.");
  }
  showModel();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  runAll();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
form.addEventListener("input", showCode);
find("stop-run").addEventListener("click", () => running?.abort());
find("again").addEventListener("click", () => {
  field("seed").value = shownSeed;
  form.requestSubmit();
});
field("model").addEventListener("change", () => { showModel(); forgetStudy(); });
find("capture").addEventListener("click", capture);
for (const name of ["toward", "away", "where"]) field(name).addEventListener("change", forgetStudy);
for (const name of ["layer", "scale"]) field(name).addEventListener("input", showStudy);
for (const name of ["layer", "scale", "norm_match"]) field(name).addEventListener("change", onSteeringChange);
field("steer").addEventListener("change", () => { showCode(); if (!find("output").hidden) runAll({ again: true }); });
find("heat").addEventListener("change", (event) => find("output").classList.toggle("plain", !event.target.checked));
for (const tab of document.querySelectorAll("#code [role=tab]")) {
  tab.addEventListener("click", () => selectTab(tab));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = tab.nextElementSibling ?? tab.previousElementSibling;
    selectTab(other);
    other.focus();
  });
}

showModels().catch(showFault).finally(() => {
  forgetStudy();
  page.dataset.ready = "true";
});
