// What the pages do without the server: copying, the theme, dialogs. Elements say by data- attributes what they want.
"use strict";

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* for this page only, then */ }
}

// Pages served over plain HTTP on a name other than localhost have no clipboard but this.
function copyBySelecting(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelecting(text);
  }
}

// data-copy: the text of the element that this selector names, or of the code block around the button.
async function copyFor(button) {
  const source = button.dataset.copy
    ? document.querySelector(button.dataset.copy)
    : button.closest(".code").querySelector("pre");
  const isCopied = await copyText(source.value ?? source.textContent.trim());
  button.dataset.label ??= button.textContent;
  button.textContent = isCopied ? "Copied" : "Select and copy";
  say(isCopied ? "Copied" : "Copying did not work");
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

// What a screen reader says without the focus moving.
function say(text) {
  document.getElementById("said").textContent = text;
}

document.addEventListener("click", (event) => {
  const target = event.target instanceof Element ? event.target.closest("[data-copy], [data-theme-switch], [data-opens], [data-closes]") : null;
  if (!target) return;
  if (target.hasAttribute("data-copy")) copyFor(target);
  if (target.hasAttribute("data-theme-switch")) switchTheme();
  if (target.hasAttribute("data-opens")) document.querySelector(target.dataset.opens).showModal();
  if (target.hasAttribute("data-closes")) target.closest("dialog").close();
});

// A filter is applied when it changes; without JavaScript its form has a button.
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-submit-on-change]");
  if (form) form.requestSubmit();
});
