package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/zeebo/xxh3"
)

// An image is a file with the packed weights of one model, the same for every instruction set: a header of a
// page, then the memory as it is. Loading a model from its image takes a fraction of the time.
//
//	 0  8  magic and version
//	 8  8  bytes of the memory
//	16 16  XXH3-128 of the memory
const (
	imageMagic  = "kvportW\x01"
	imageHeader = 4096
	imageSuffix = ".weights"
)

// Images is a folder of images: a cache, which may be emptied at any time. The zero Images keeps nothing.
type Images struct {
	Dir string // made with mode 0700 when it is missing
	Max int    // how many images are kept, those used last; 0: 4
}

// errImage says that an image cannot be used; it will be written again.
var errImage = errors.New("no usable image")

func (i Images) path(name string) string { return filepath.Join(i.Dir, name+imageSuffix) }

// Open maps the image called name, if there is one that is whole and of this user: every byte is checked.
// The matrices that Pack then makes in it, in the order in which they were packed first, are there already.
func (i Images) Open(name string, bytes int) (*Memory, error) {
	if i.Dir == "" {
		return nil, errImage
	}
	file := i.path(name)
	data, release, err := mapImage(file, imageHeader+bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errImage, err)
	}
	m := &Memory{data: data, free: data[imageHeader:], full: true, release: release}
	if string(data[:imageHeader]) != string(header(m.free)) {
		return nil, errors.Join(fmt.Errorf("%w: %s is damaged", errImage, file), m.Close())
	}
	now := time.Now()
	_ = os.Chtimes(file, now, now) // only the order in which images are dropped depends on it
	return m, nil
}

// header is the header of an image of memory.
func header(memory []byte) []byte {
	b := make([]byte, 0, imageHeader)
	b = append(b, imageMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(memory)))
	sum := xxh3.Hash128(memory).Bytes()
	return append(b, sum[:]...)[:imageHeader]
}

// Save writes the image of m, which holds bytes of matrices, and drops images beyond the limit. Readers see all of an image
// or nothing of it.
func (i Images) Save(name string, m *Memory, bytes int) error {
	if i.Dir == "" {
		return nil
	}
	if err := os.MkdirAll(i.Dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(i.Dir, "new-*") // mode 0600
	if err != nil {
		return err
	}
	memory := m.data[:bytes]
	_, err = f.Write(header(memory))
	if err == nil {
		_, err = f.Write(memory)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), i.path(name)); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return i.trim()
}

// trim removes the images that were not used for longest, and what a writer left that died an hour ago.
func (i Images) trim() error {
	entries, err := os.ReadDir(i.Dir)
	if err != nil {
		return err
	}
	var images []os.FileInfo
	var errs []error
	remove := func(name string) {
		if err := os.Remove(filepath.Join(i.Dir, name)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for _, e := range entries {
		info, err := e.Info()
		switch {
		case err != nil || !info.Mode().IsRegular():
		case strings.HasSuffix(e.Name(), imageSuffix):
			images = append(images, info)
		case strings.HasPrefix(e.Name(), "new-") && time.Since(info.ModTime()) > time.Hour:
			remove(e.Name())
		}
	}
	slices.SortFunc(images, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	most := i.Max
	if most <= 0 {
		most = 4
	}
	for _, info := range images[min(most, len(images)):] {
		remove(info.Name())
	}
	return errors.Join(errs...)
}
