// Whose work the answer is: who spoke, what each of them knows, and what one of them says alone or is missed for.

import { byId, h } from "../lib/dom.js";
import { percent } from "../lib/format.js";

const MOST = 8; // buttons; any other expert can be picked in the table
const INVITATION = "Pick one to see its answer alone, or the answer without it.";
export const CLOUD = "cloud";

export class Whose {
  /** `onChoose()` when another answer is wanted, `onDisagree(on)` when differences are to be shown or not. */
  constructor({ onChoose, onDisagree }) {
    this.onChoose = onChoose;
    this.names = new Map(); // what clients know, by id
    this.hasHead = false;
    this.who = null; // an expert's id or CLOUD; null: everybody, the fused answer
    this.spoke = []; // of the fused answer, the weightiest first
    this.disagree = byId("disagree");
    this.disagree.addEventListener("change", () => onDisagree(this.disagree.checked));
    for (const radio of this.#modes) radio.addEventListener("change", onChoose);
  }

  /** What each client knows; null where nobody said. */
  setNames(experts) {
    this.names = new Map(experts.filter(({ knows }) => knows).map(({ id, knows }) => [id, knows]));
  }

  /** What a request for the answer adds to its parameters; null: nothing, everybody answers. */
  get choice() {
    if (this.who === null) return null;
    return { [this.#modes.find((radio) => radio.checked).value]: this.who };
  }

  nameOf(who) {
    return who === CLOUD ? "the cloud\u2019s head" : (this.names.get(who) ?? `expert ${who}`);
  }

  /** Another answer is wanted: that of `who`, or everybody's; picking the same one again leads back. */
  choose(who) {
    this.who = who === this.who ? null : who;
    this.#draw();
    this.onChoose();
  }

  /** Forget all of it: another image. */
  reset() {
    this.who = null;
    this.spoke = [];
    byId("whose").hidden = true;
  }

  /** Who spoke in the fused answer. */
  setFused(answer) {
    const experts = answer.routing.experts.filter(({ weight }) => weight > 0);
    this.spoke = experts.sort((a, b) => b.weight - a.weight).slice(0, MOST);
    byId("whose").hidden = false;
    this.#draw();
  }

  /** Say what is shown; `share` of pixels differs from the fused answer, undefined while that is not known. */
  describe(answer, share) {
    const alone = this.choice && "only" in this.choice;
    const words =
      this.who === null ? INVITATION : `${alone ? "" : "Without "}${this.nameOf(this.who)}${alone ? " alone" : ""}`;
    const faded = this.who !== null && answer.routing.degraded ? `, ${answer.routing.reason}` : "";
    byId("whose-words").textContent = words[0].toUpperCase() + words.slice(1) + faded;
    byId("disagree-share").textContent = share === undefined ? "" : percent(share);
  }

  get #modes() {
    return [...document.querySelectorAll("input[name=whose-mode]")];
  }

  #draw() {
    const focused = document.activeElement?.dataset?.who; // keyboard users stay where they are
    const list = byId("whose-list");
    const shown = this.spoke.map(({ id, weight }) => [id, weight]);
    const extra = typeof this.who === "number" && !shown.some(([id]) => id === this.who);
    list.replaceChildren(
      this.#button(null, "All together"),
      ...shown.map(([id, weight]) => this.#expertButton(id, weight)),
      ...(extra ? [this.#expertButton(this.who, null)] : []),
      ...(this.hasHead ? [this.#button(CLOUD, "Cloud\u2019s head")] : []),
    );
    if (focused !== undefined) list.querySelector(`[data-who="${focused}"]`)?.focus();
    byId("whose-tools").hidden = this.who === null;
    for (const row of document.querySelectorAll("tr[data-expert]")) {
      const chosen = row.dataset.expert === String(this.who);
      row.toggleAttribute("data-chosen", chosen);
      row.querySelector("button").setAttribute("aria-pressed", String(chosen));
    }
  }

  #expertButton(id, weight) {
    const known = this.names.get(id);
    return this.#button(
      id,
      known ? h("span", { class: "who-id" }, String(id)) : null,
      known ?? `Expert ${id}`,
      weight === null ? null : h("span", { class: "who-weight" }, percent(weight, 0)),
    );
  }

  #button(who, ...content) {
    return h(
      "button",
      {
        type: "button",
        class: "who",
        "data-who": who ?? "all",
        "aria-pressed": String(who === this.who),
        // everybody's answer is one click away from any other
        onclick: () => (who === null && this.who === null ? null : this.choose(who)),
      },
      ...content,
    );
  }
}
