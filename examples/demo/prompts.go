package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// prompt is a piece of real text from the repository.
type prompt struct {
	name, text string
}

// sources are the texts prompts are cut from; each is long enough for any piece.
var sources = [...]string{"LICENSE", "CONTRIBUTING.md", "README.md", "docs/design.md"}

// Sizes of the smallest and largest prompt in bytes: about 100 and 1,400 tokens of English text.
const minBytes, maxBytes = 500, 5600

// readPrompts cuts n prompts of growing size from the texts below dir.
func readPrompts(dir string, n int) ([]prompt, error) {
	var out []prompt
	for i := range n {
		name := sources[i%len(sources)]
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, fmt.Errorf("read a text for the prompts: %w", err)
		}
		size := minBytes + (maxBytes-minBytes)*i/max(1, n-1)
		// Prompts from one source start at different places, so that none is a prefix of another.
		text := strings.Repeat(string(data), 1+(97*n+size)/len(data))[97*i:]
		out = append(out, prompt{
			name: fmt.Sprintf("%d %s", i+1, filepath.Base(name)),
			text: strings.ToValidUTF8(text[:size], ""),
		})
	}
	return out, nil
}

// secondTurn goes on from an answer, as a conversation does.
func (p prompt) secondTurn(answer string) string {
	return p.text + answer + "\n\nIn other words, the text above says that"
}

// killPrompt is a text of the largest size that no engine has seen.
func killPrompt(prompts []prompt) string {
	last := prompts[len(prompts)-1].text
	return "Summary of what follows, for a reader in a hurry.\n" + last
}
