// Names for what Django's admin leaves without one: the boxes of its searched lists, for a screen reader.
"use strict";

function nameSearchedLists() {
  for (const select of document.querySelectorAll("select.admin-autocomplete")) {
    const label = document.querySelector(`label[for="${CSS.escape(select.id)}"]`);
    const boxes = select.nextElementSibling?.querySelectorAll("[role=combobox], [role=textbox]") ?? [];
    for (const box of boxes) {
      box.removeAttribute("aria-labelledby");
      box.setAttribute("aria-label", label?.textContent.trim().replace(/:$/, "") ?? "Choose");
    }
  }
}

// The lists are made at some time after the page is there, and again for each row that is added.
new MutationObserver(nameSearchedLists).observe(document.body, { childList: true, subtree: true });
nameSearchedLists();
