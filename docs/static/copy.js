// Puts a button on each block of code that copies it. Drawings and output have none.
document.addEventListener("DOMContentLoaded", () => {
    if (!navigator.clipboard) return;  // not on a page without https
    for (const block of document.querySelectorAll("div.highlight-bash, div.highlight-python, div.highlight-yaml, div.highlight-ini")) {
        const button = document.createElement("button");
        button.className = "copy";
        button.type = "button";
        button.textContent = "Copy";
        button.addEventListener("click", async () => {
            await navigator.clipboard.writeText(block.querySelector("pre").textContent);
            button.textContent = "Copied";
            setTimeout(() => { button.textContent = "Copy"; }, 2000);
        });
        block.appendChild(button);
    }
});
