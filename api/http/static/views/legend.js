// Classes of the answer by area. Pointing at one or focusing it shows it alone; pressing keeps it so.

import { byId, h } from "../lib/dom.js";
import { fixed, percent, plain } from "../lib/format.js";

export class Legend {
  constructor(onHighlight) {
    this.list = byId("legend");
    this.onHighlight = onHighlight;
    this.pinned = null;
    this.pointed = null;
  }

  show(answer, colours) {
    const pixels = answer.width * answer.height;
    const segments = [...answer.segments].sort((a, b) => b.area - a.area);
    if (!segments.some((segment) => segment.id === this.pinned)) this.pinned = null;
    const focused = document.activeElement?.dataset?.class; // an update must not throw keyboard users out of the list
    this.list.replaceChildren(...segments.map((segment) => this.#row(segment, pixels, colours[segment.id])));
    if (focused !== undefined) this.list.querySelector(`[data-class="${focused}"]`)?.focus();
    this.#update();
  }

  /** All classes of the model, before the first answer. */
  preview(classes) {
    this.pinned = this.pointed = null;
    const rows = classes.map(({ id, name, color }) => this.#row({ id, label: name }, 1, color));
    this.list.replaceChildren(...rows);
    this.#update();
  }

  togglePin(id) {
    this.pinned = this.pinned === id ? null : id;
    this.#update();
  }

  #row({ id, label, area, score }, pixels, colour) {
    const share = area === undefined ? undefined : area / pixels;
    const point = (value) => () => {
      this.pointed = value;
      this.#update();
    };
    const button = h(
      "button",
      {
        type: "button",
        class: "class-row",
        "data-class": id,
        "data-testid": `class-${id}`,
        vars: { "--class": colour ? `rgb(${colour.join(" ")})` : "grey", "--share": share ?? 0 },
        onpointerenter: (event) => event.pointerType === "mouse" && point(id)(),
        onpointerleave: point(null),
        onfocus: (event) => event.currentTarget.matches(":focus-visible") && point(id)(),
        onblur: point(null),
        onclick: () => this.togglePin(id),
      },
      h("span", { class: "swatch" }),
      h("span", { class: "class-name" }, plain(label)),
      h("span", { class: "class-area" }, percent(share)),
      h(
        "span",
        { class: "class-score", title: "Mean softmax over the class's pixels" },
        h("span", { class: "sr-only" }, "score "),
        fixed(score, 2),
      ),
    );
    return h("li", {}, button);
  }

  #update() {
    const shown = this.pointed ?? this.pinned;
    for (const button of this.list.querySelectorAll("button")) {
      const id = Number(button.dataset.class);
      button.setAttribute("aria-pressed", String(id === this.pinned));
      button.classList.toggle("is-dimmed", shown !== null && shown !== id);
    }
    this.onHighlight(shown);
  }
}
