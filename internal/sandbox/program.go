package sandbox

import (
	"bufio"
	"debug/elf"
	"encoding/binary"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLine bounds the first line of a script, and the name of a loader.
const maxLine = 256

// Program lists what must be started to run a program: its file, the interpreter of a script, and the loader of
// shared libraries. Of an interpreter that is a script itself nothing more is found. The files may be hostile: it reads
// little of them, and finds nothing where the kernel could find something else.
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

// open opens a file without waiting for the writer of a named pipe.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// interpreter is what the first line of a script names; empty for other files.
func interpreter(path string) string {
	f, err := open(path)
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

// loader is what an ELF file names as its interpreter; empty for a static one. As in the kernel the first name counts:
// a file cannot make a folder of another one its loader.
func loader(path string) string {
	f, err := open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	var header elf.Header64
	if err := binary.Read(f, binary.LittleEndian, &header); err != nil || string(header.Ident[:len(elf.ELFMAG)]) != elf.ELFMAG || elf.Class(header.Ident[elf.EI_CLASS]) != elf.ELFCLASS64 {
		return ""
	}
	programs := io.NewSectionReader(f, int64(header.Phoff), int64(header.Phnum)*int64(binary.Size(elf.Prog64{})))
	for range header.Phnum {
		var p elf.Prog64
		if err := binary.Read(programs, binary.LittleEndian, &p); err != nil {
			return ""
		}
		if elf.ProgType(p.Type) == elf.PT_INTERP {
			return text(f, &p)
		}
	}
	return ""
}

// text is a segment that is a text with a zero byte at its end; empty if it is too long, or none.
func text(f io.ReaderAt, p *elf.Prog64) string {
	if p.Filesz == 0 || p.Filesz > maxLine {
		return ""
	}
	data := make([]byte, p.Filesz)
	if _, err := f.ReadAt(data, int64(p.Off)); err != nil {
		return ""
	}
	name, _, ended := strings.Cut(string(data), "\x00")
	if !ended {
		return ""
	}
	return name
}
