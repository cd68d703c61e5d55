// The page: one image, one set of parameters, one request at a time.

import { getConfig, segment } from "./lib/api.js";
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

const picture = new Picture();
const flow = new Flow();
const legend = new Legend((id) => picture.highlight(id));
const experts = new Experts();
const live = new Live();
const controls = new Controls({ onChange: run, onCounts: (n, k) => flow.setCounts(n, k) });

let config = null;
let image = null; // {blob, type, name}
let request = null; // the latest; whatever an older one brings is dropped

async function start() {
  try {
    config = await getConfig();
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
    const answer = await segment(image, controls.parameters, mine.signal);
    if (mine === request) await show(answer);
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

async function show(answer) {
  const changedShare = await picture.setMask(answer);
  legend.show(answer, picture.palette);
  experts.show(answer);
  showFacts(answer, changedShare);
  controls.setClients(answer.routing.experts.length);
  flow.done(answer);
  byId("results").dataset.state = "answered";
  if (answer.routing.degraded) showNotice("warning", "Degraded answer", answer.routing.reason ?? "");
  else clearNotice();
  byId("announce").textContent = inWords(answer);
  byId("mask-canvas").setAttribute("aria-label", inWords(answer));
  live.refresh();
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
