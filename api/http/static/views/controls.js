// The controls: parameters of a request, and how its answer is shown.

import { byId, debounce } from "../lib/dom.js";

const PAUSE_MS = 60; // no request while a slider is still moving: pointers report every 16 ms, held keys every 33
const HINTS = {
  air: "Clients transmit together; fading and noise come in.",
  ideal: "The exact sum: what the air is measured against.",
  digital: "Quantised and free of errors, one client after another; SNR sets the air time.",
};

export class Controls {
  /** `onChange()` when a request has to be made again, `onCounts(n, k)` when N or K changes. */
  constructor({ onChange, onCounts }) {
    this.onCounts = onCounts;
    this.seed = newSeed();
    const changeSoon = debounce(onChange, PAUSE_MS);
    for (const [id, event] of [
      ["snr", "input"],
      ["top-k", "input"],
      ["channel", "change"],
    ]) {
      byId(id).addEventListener(event, () => {
        this.#show();
        changeSoon();
      });
    }
    byId("reroll").addEventListener("click", () => {
      this.seed = newSeed();
      this.#show();
      onChange();
    });
    this.#show();
  }

  get parameters() {
    return {
      topK: Number(byId("top-k").value),
      snrDb: Number(byId("snr").value),
      channel: document.querySelector("input[name=channel]:checked").value,
      seed: this.seed,
    };
  }

  /** Start from the server's own settings. */
  reset({ routing, channel, experts }) {
    byId("top-k").max = String(experts.count);
    byId("top-k").value = String(routing.top_k);
    byId("snr").value = String(channel.snr_db);
    const kind = document.querySelector(`input[name=channel][value="${channel.kind}"]`);
    if (kind) kind.checked = true;
    this.#show();
  }

  /** Experts may be added or taken away while the page is open. */
  setClients(n) {
    byId("top-k").max = String(n);
    this.#show();
  }

  #show() {
    const { topK, snrDb, channel, seed } = this.parameters;
    const snr = byId("snr");
    const slider = byId("top-k");
    snr.disabled = channel === "ideal";
    byId("snr-value").textContent = snr.disabled ? "no noise" : `${String(snrDb).replace("-", "\u2212")}\u202fdB`;
    snr.setAttribute("aria-valuetext", `${snrDb} decibel`);
    byId("top-k-value").textContent = `${topK} of ${slider.max}`;
    byId("top-k-max").textContent = slider.max;
    byId("seed-value").textContent = seed;
    byId("channel-hint").textContent = HINTS[channel];
    for (const each of [snr, slider]) fillTrack(each);
    this.onCounts(slider.max, topK);
  }
}

/** View switch and opacity slider; they change the picture without a request. */
export function setUpView(picture) {
  const opacity = byId("opacity");
  opacity.addEventListener("input", () => {
    picture.setOpacity(Number(opacity.value) / 100);
    fillTrack(opacity);
  });
  fillTrack(opacity);
  for (const radio of document.querySelectorAll("input[name=view]")) {
    radio.addEventListener("change", () => {
      picture.setView(radio.value);
      opacity.disabled = radio.value !== "overlay";
      byId("opacity-field").classList.toggle("is-off", opacity.disabled);
    });
  }
}

/** The name of the class under the pointer; a click keeps the class highlighted. */
export function setUpProbe(picture, nameOf, onClick) {
  const layers = byId("layers");
  const probe = byId("probe");
  layers.addEventListener("pointermove", (event) => {
    const id = picture.classAt(event);
    probe.hidden = id === null;
    probe.textContent = id === null ? "" : nameOf(id);
  });
  layers.addEventListener("pointerleave", () => (probe.hidden = true));
  layers.addEventListener("click", (event) => {
    const id = picture.classAt(event);
    if (id !== null) onClick(id);
  });
}

function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

/** The part of the track left of the thumb, which only Firefox can style by itself. */
function fillTrack(slider) {
  const span = slider.max - slider.min || 1;
  slider.style.setProperty("--filled", String((slider.value - slider.min) / span));
}
