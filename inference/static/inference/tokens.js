// A choice's text as its tokens: how likely each was as its colour and on hover, the alternatives on click.

const html = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// What white space and an empty token look like in a table.
export function visible(token) {
  return token === "" ? "∅" : token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

const percent = (logprob) => {
  const p = Math.exp(logprob) * 100;
  return p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
};

export class TokenView {
  // `onContinue(text)` is called with the choice's text up to an alternative that was chosen, and that.
  constructor({ label, onContinue }) {
    this.onContinue = onContinue;
    this.tokens = [];
    this.text = "";
    this.box = html("div", { className: "tokens" });
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${label}: arrow keys move between tokens, Enter shows alternatives`);
    this.details = html("div", { className: "alternatives", hidden: true });
    this.details.setAttribute("role", "region");
    this.details.setAttribute("aria-label", `${label}: alternatives`);
    this.element = html("div", { className: "choice" }, this.box, this.details);
    this.box.addEventListener("click", (event) => this.#open(event.target));
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
  }

  // Adds what a chunk brought: its text, and `logprobs` where they were asked for.
  add(text, logprobs) {
    this.text += text;
    if (!logprobs || logprobs.tokens.length === 0) {
      if (text) this.box.append(text);
      return;
    }
    // Text that may become a stop string is held back behind its tokens; the tokens are what is shown.
    logprobs.tokens.forEach((token, at) => this.#append(token, logprobs.token_logprobs[at], logprobs.top_logprobs[at]));
  }

  #append(token, logprob, top) {
    const element = html("span", { className: "token", textContent: token, tabIndex: this.tokens.length ? -1 : 0 });
    element.setAttribute("role", "button");
    element.dataset.at = this.tokens.length;
    if (logprob !== null) {
      element.style.setProperty("--surprise", Math.min(1, -logprob / 6).toFixed(3));
      element.title = `${visible(token)}  ${percent(logprob)}  logprob ${logprob.toFixed(3)}`;
      element.setAttribute("aria-label", `${visible(token)}, ${percent(logprob)}`);
    }
    this.tokens.push({ token, logprob, top, element });
    this.box.append(element);
  }

  #onKey(event) {
    const at = Number(event.target.dataset?.at);
    if (Number.isNaN(at)) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to !== undefined && this.tokens[to]) {
      this.tokens[at].element.tabIndex = -1;
      this.tokens[to].element.tabIndex = 0;
      this.tokens[to].element.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      this.#open(event.target);
    } else if (event.key === "Escape") {
      this.details.hidden = true;
    } else {
      return;
    }
    event.preventDefault();
  }

  #open(element) {
    const at = Number(element.dataset?.at);
    if (Number.isNaN(at)) return;
    for (const { element: other } of this.tokens) other.removeAttribute("aria-pressed");
    element.setAttribute("aria-pressed", "true");
    const { token, top } = this.tokens[at];
    const rows = Object.entries(top ?? {}).sort((one, other) => other[1] - one[1]);
    this.details.replaceChildren(
      html("p", { className: "small soft" }, `Token ${at + 1}: `, html("code", { textContent: visible(token) }),
        rows.length ? ", and what else could have stood there" : ": nothing came before it"),
      html("ul", {}, ...rows.map(([other, logprob]) => this.#alternative(at, other, logprob, other === token))),
    );
    this.details.hidden = false;
  }

  #alternative(at, token, logprob, isChosen) {
    const bar = html("meter", { min: 0, max: 1, value: Math.exp(logprob) });
    bar.setAttribute("aria-label", `probability of ${visible(token)}`);
    const name = html("code", { textContent: visible(token) });
    const figures = html("span", { className: "small soft nowrap", textContent: `${percent(logprob)} · ${logprob.toFixed(3)}` });
    if (isChosen) return html("li", { className: "chosen" }, name, bar, figures, html("span", { className: "small soft", textContent: "stands" }));
    const button = html("button", { type: "button", className: "quiet small", textContent: "Continue from it" });
    button.setAttribute("aria-label", `Continue from ${visible(token)}`);
    button.addEventListener("click", () => {
      this.onContinue(this.tokens.slice(0, at).map((one) => one.token).join("") + token);
    });
    return html("li", {}, name, bar, figures, button);
  }
}
