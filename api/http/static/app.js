// The page: one image, one set of parameters, one request at a time.

import { getConfig, getExperts, segment } from "./lib/api.js";
import { Picture } from "./views/canvas.js";
import { Controls, setUpProbe, setUpView } from "./views/controls.js";
import { byId } from "./lib/dom.js";
import { Experts } from "./views/experts.js";
import { showFacts } from "./views/facts.js";
import { Flow } from "./views/flow.js";
import { bytes, percent, plain, ratioInDecibel } from "./lib/format.js";
import { loadSamples, setUpInput } from "./views/input.js";
import { Legend } from "./views/legend.js";
import { Live } from "./views/live.js";
import { clearNotice, showError, showNotice } from "./views/notice.js";
import { Whose } from "./views/whose.js";

const picture = new Picture();
const flow = new Flow();
const legend = new Legend((id) => picture.highlight(id));
const whose = new Whose({ onChoose: run, onDisagree: (on) => picture.markDifferences(on) });
const experts = new Experts(whose);
const live = new Live();
const controls = new Controls({ onChange: run, onCounts: (n, k) => flow.setCounts(n, k) });

let config = null;
let image = null; // {blob, type, name}
let request = null; // the latest; whatever an older one brings is dropped
let fused = null; // {key, answer}: everybody's answer to the image, and the parameters it was asked with

async function start() {
  try {
    const [found, clients] = await Promise.all([getConfig(), getExperts()]);
    config = found;
    whose.setNames(clients);
    whose.hasHead = config.settings.experts.shared;
    showTerms(config);
    for (const { id, color } of config.classes) picture.palette[id] = color;
    legend.preview(config.classes);
    controls.reset(config.settings);
    loadSamples(useImage, showError);
    live.refresh();
    run(); // an image may have come in before the server could be reached
  } catch (error) {
    showError(error, start);
  }
}

async function useImage(chosen) {
  const limit = config?.limits?.max_bytes;
  if (limit && chosen.blob.size > limit) {
    const sizes = `${bytes(chosen.blob.size)}, and the server takes ${bytes(limit)}.`;
    showNotice("error", `${chosen.name} is too large`, sizes);
    return;
  }
  request?.abort();
  image = chosen;
  fused = null;
  whose.reset();
  clearNotice();
  if (config) legend.preview(config.classes);
  const zone = byId("drop-zone");
  zone.dataset.state = "filled";
  byId("image-name").textContent = plain(chosen.name);
  zone.classList.toggle("no-preview", !(await picture.setImage(chosen.blob)));
  if (image === chosen) run(); // unless another one was chosen meanwhile
}

async function run() {
  if (!image || !config) return;
  request?.abort();
  const mine = (request = new AbortController());
  setBusy(true);
  try {
    await answerTo(controls.parameters, whose.choice, mine);
  } catch (error) {
    if (error.name === "AbortError" || mine !== request) return;
    flow.stop();
    const fromServer = error.status !== undefined;
    if (!fromServer) console.error(error);
    showError(fromServer ? error : { message: "The answer could not be shown", detail: error.message }, run);
  } finally {
    if (mine === request) setBusy(false);
  }
}

/** Ask and show. An answer of one participant comes first, then what it is compared with, unless that is known. */
async function answerTo(parameters, choice, mine) {
  const key = JSON.stringify(parameters);
  const ask = (whom) => segment(image, parameters, whom, mine.signal);
  const known = fused?.key === key;
  const answer = choice === null && known ? fused.answer : await ask(choice);
  if (mine !== request) return;
  if (choice === null) fused = { key, answer };
  await show(answer, choice);
  if (choice === null || mine !== request) return;
  if (!known) {
    const everybody = await ask(null);
    if (mine !== request) return;
    fused = { key, answer: everybody };
    whose.setFused(everybody);
  }
  const share = await picture.compareWith(fused.answer);
  if (mine === request) whose.describe(answer, share ?? undefined);
}

async function show(answer, choice) {
  const changedShare = await picture.setMask(answer);
  legend.show(answer, picture.palette);
  experts.show(answer);
  if (choice === null) whose.setFused(answer);
  whose.describe(answer);
  showFacts(answer, changedShare);
  controls.setClients(answer.routing.experts.length);
  flow.done(answer);
  byId("results").dataset.state = "answered";
  if (choice === null && answer.routing.degraded) showNotice("warning", "Degraded answer", answer.routing.reason ?? "");
  else clearNotice();
  const words = `${choice === null ? "" : `${byId("whose-words").textContent}. `}${inWords(answer)}`;
  byId("announce").textContent = words;
  byId("mask-canvas").setAttribute("aria-label", words);
  live.refresh();
}

/** The terms of the weights, where they carry any. */
function showTerms({ name, terms }) {
  byId("terms").hidden = !terms;
  byId("terms").textContent = `${name ? `Model ${name}` : "Weights"}: ${terms}`;
}

function setBusy(busy) {
  byId("results").setAttribute("aria-busy", String(busy));
  byId("progress").hidden = !busy;
  if (busy) flow.start();
}

/** The answer in a sentence, for screen readers. */
function inWords(answer) {
  const pixels = answer.width * answer.height;
  const largest = [...answer.segments].sort((a, b) => b.area - a.area).slice(0, 3);
  const classes = largest.map((found) => `${plain(found.label)} ${percent(found.area / pixels, 0)}`).join(", ");
  return `Segmented: ${classes}. Distortion ${ratioInDecibel(answer.channel.nmse)}.`;
}

const nameOf = (id) => plain(config?.classes.find((one) => one.id === id)?.name ?? `class ${id}`);

setUpView(picture);
setUpProbe(picture, nameOf, (id) => legend.togglePin(id));
setUpInput(useImage, (title, detail) => showNotice("error", title, detail));
start();
