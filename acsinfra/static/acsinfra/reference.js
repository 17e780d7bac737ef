// The reference: Swagger UI over our own document, light or dark as the rest of the page.
"use strict";

function followTheme() {
  document.documentElement.classList.toggle("dark-mode", isDark());
}

const place = document.getElementById("reference");
SwaggerUIBundle({
  url: place.dataset.document,
  domNode: place,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  defaultModelExpandDepth: 3,
  presets: [SwaggerUIBundle.presets.apis],
});
// What Swagger UI leaves without a name or out of the keyboard's reach.
function nameControls() {
  for (const select of place.querySelectorAll("select:not([aria-label])")) {
    select.setAttribute("aria-label", select.id === "servers" ? "Server" : select.closest(".content-type-wrapper, .response-content-type") ? "Media type" : "Example");
  }
  for (const code of place.querySelectorAll("pre:not([tabindex])")) code.tabIndex = 0;
}

new MutationObserver(nameControls).observe(place, { childList: true, subtree: true });
followTheme();
new MutationObserver(followTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", followTheme);
