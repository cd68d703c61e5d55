// The table of experts: divergence from the query, probability, and the weight of those that transmitted.
//
// One real table: the bars are decoration inside cells that also hold the number, so a screen reader loses nothing.

import { byId, h, setVars } from "../lib/dom.js";
import { MISSING, fixed, percent } from "../lib/format.js";

const MOST_ROWS = 30;
const STEPS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5]; // upper ends of axes
const ROLES = {
  routed: "routed",
  faded: "deep fade",
  absent: "absent",
  substitute: "substitute",
  "left-out": "left out",
  idle: "",
};

export class Experts {
  /** `whose` has the experts' names, and takes it when one of them is picked. */
  constructor(whose) {
    this.whose = whose;
    this.body = byId("experts-body");
    this.rows = new Map();
    this.order = "id";
    for (const radio of document.querySelectorAll("input[name=expert-order]")) {
      radio.addEventListener("change", () => {
        this.order = radio.value;
        if (this.answer) this.show(this.answer);
      });
    }
  }

  show(answer) {
    this.answer = answer;
    byId("experts-empty").hidden = true;
    byId("experts-table").hidden = false;
    byId("experts-note").hidden = false;
    const experts = answer.routing.experts;
    const truncated = new Set(answer.channel.truncated ?? []);
    const shown = this.#choose(experts);
    const scale = {
      js: upperEnd(shown, "js", Math.LN2), // the largest there can be [nats]
      probability: upperEnd(shown, "probability", 1),
      weight: upperEnd(shown, "weight", 1),
    };
    const ids = shown.map((expert) => expert.id).join();
    if (ids !== this.shownIds) {
      // Rows are kept where they are otherwise: bars then glide from the old value to the new one.
      this.shownIds = ids;
      this.body.replaceChildren(...shown.map(({ id }) => this.#row(id).element));
    }
    const leftOut = this.whose.choice?.without;
    for (const expert of shown) {
      const role = expert.id === leftOut ? "left-out" : roleOf(expert, truncated);
      this.#fill(this.#row(expert.id), expert, role, scale);
    }
    this.#describe(experts, shown.length, truncated, scale);
  }

  #choose(experts) {
    const nearestFirst = [...experts].sort((a, b) => (a.js ?? Infinity) - (b.js ?? Infinity) || a.id - b.id);
    if (experts.length <= MOST_ROWS && this.order === "id") return [...experts].sort((a, b) => a.id - b.id);
    const spoke = (expert) => expert.selected || expert.weight > 0;
    const top = [...nearestFirst.filter(spoke), ...nearestFirst.filter((expert) => !spoke(expert))].slice(0, MOST_ROWS);
    return this.order === "id" ? top.sort((a, b) => a.id - b.id) : top;
  }

  #row(id) {
    if (!this.rows.has(id)) {
      const cell = (name) =>
        h(
          "td",
          { class: `bar-cell ${name}` },
          h("span", { class: "value" }),
          h("span", { class: "track", "aria-hidden": "true" }, h("i")),
        );
      const role = h("span", { class: "role" });
      const known = this.whose.names.get(id);
      const pick = h(
        "button",
        {
          type: "button",
          class: "expert-pick",
          title: `What ${this.whose.nameOf(id)} says alone`,
          "aria-pressed": "false",
          onclick: () => this.whose.choose(id),
        },
        h("span", { class: "expert-id" }, String(id)),
        h("span", { class: "expert-words" }, known ? h("span", { class: "knows" }, known) : null, role),
      );
      const cells = [cell("js"), cell("probability"), cell("weight")];
      const element = h(
        "tr",
        { "data-expert": id },
        h("th", { scope: "row" }, pick),
        ...cells,
      );
      this.rows.set(id, { element, role, cells });
    }
    return this.rows.get(id);
  }

  #fill({ element, role, cells }, expert, state, scale) {
    element.dataset.role = state;
    role.textContent = ROLES[state];
    const [js, probability, weight] = cells;
    const shareOf = (name) =>
      expert[name] > 0 || (name === "js" && expert.js === 0) ? expert[name] / scale[name] : null;
    fillCell(js, fixed(expert.js, 3), shareOf("js"));
    fillCell(probability, percent(expert.probability), shareOf("probability"));
    fillCell(weight, expert.weight > 0 ? percent(expert.weight) : MISSING, shareOf("weight"));
  }

  #describe(experts, shown, truncated, scale) {
    const routed = experts.filter((expert) => expert.selected).length;
    const absent = experts.filter((expert) => expert.js === null).length;
    const parts = [`${routed} of ${experts.length} routed`];
    if (truncated.size) parts.push(`${truncated.size} of them in deep fade`);
    if (absent) parts.push(`${absent} absent`);
    if (shown < experts.length) parts.push(`the ${shown} nearest shown`);
    byId("experts-summary").textContent = parts.join(", ");
    byId("js-scale").textContent = `to ${Number(scale.js.toPrecision(3))} nats`;
    byId("probability-scale").textContent = `to ${percent(scale.probability, scale.probability < 0.01 ? 1 : 0)}`;
    byId("weight-scale").textContent = `to ${percent(scale.weight, scale.weight < 0.01 ? 1 : 0)}`;
  }
}

function roleOf(expert, truncated) {
  if (expert.js === null) return "absent";
  if (expert.selected) return truncated.has(expert.id) ? "faded" : "routed";
  return expert.weight > 0 ? "substitute" : "idle";
}

/** Upper end of an axis: divergences sit far below ln 2 and shares near 1/N, where all would look alike. */
function upperEnd(experts, name, most) {
  const largest = Math.max(0, ...experts.map((expert) => expert[name] ?? 0));
  return STEPS.find((step) => step >= largest) ?? most;
}

function fillCell(cell, text, share) {
  cell.firstElementChild.textContent = text;
  cell.classList.toggle("is-empty", share === null);
  setVars(cell, { "--value": share ?? 0 });
}
