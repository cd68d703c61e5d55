// The strip under the title: the places an image passes, and how long each took for the last one.

import { byId } from "../lib/dom.js";
import { milliseconds } from "../lib/format.js";

const PLACES = {
  send: ["queue", "decode", "backbone"],
  clients: ["read", "route", "expert"],
  air: ["channel"],
  receive: ["encode"],
};

export class Flow {
  constructor() {
    this.root = byId("flow");
  }

  start() {
    this.root.dataset.phase = "running";
  }

  stop() {
    this.root.dataset.phase = "idle";
  }

  done(answer) {
    this.root.dataset.phase = "done";
    for (const [place, stages] of Object.entries(PLACES)) {
      const spent = stages.map((stage) => answer.timings_ms?.[stage]).filter(Number.isFinite);
      const output = this.root.querySelector(`[data-place=${place}] output`);
      output.textContent = spent.length ? milliseconds(spent.reduce((sum, value) => sum + value, 0)) : "";
    }
  }

  setCounts(clients, routed) {
    for (const element of this.root.querySelectorAll("[data-count=clients]")) element.textContent = clients;
    for (const element of this.root.querySelectorAll("[data-count=routed]")) element.textContent = routed;
  }
}
