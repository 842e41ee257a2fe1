package sandbox

import (
	"bufio"
	"debug/elf"
	"io"
	"os"
	"strings"
)

// maxLine bounds the first line of a script.
const maxLine = 256

// Program lists what must be started to run a program: its file, the interpreter of a script, and the loader of
// shared libraries. Of an interpreter that is a script itself nothing more is found.
func Program(path string) []string {
	files := []string{path}
	if script := interpreter(path); script != "" {
		files = append(files, script)
	}
	if loader := loader(files[len(files)-1]); loader != "" {
		files = append(files, loader)
	}
	return files
}

// interpreter is what the first line of a script names; empty for other files.
func interpreter(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	line, _ := bufio.NewReader(io.LimitReader(f, maxLine)).ReadString('\n') // a line without an end is one too
	rest, script := strings.CutPrefix(line, "#!")
	if words := strings.Fields(rest); script && len(words) > 0 {
		return words[0]
	}
	return ""
}

// loader is what an ELF file names as its interpreter; empty for a static one.
func loader(path string) string {
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP || p.Filesz > maxLine {
			continue
		}
		if name, err := io.ReadAll(p.Open()); err == nil {
			return strings.TrimRight(string(name), "\x00")
		}
	}
	return ""
}
