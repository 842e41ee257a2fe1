package router

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/meter"
)

// File is a config file that is read again whenever it changes. The zero value is none.
type File struct {
	Path     string
	Read     func(path string) ([]byte, error)
	Decode   func(text []byte) (*Settings, error) // errors name line and field
	Interval time.Duration                        // between two looks at the file; 1 s
}

// Settings is what a config file says. All of it replaces what the file said before.
type Settings struct {
	Instances []Instance
	Limits    Limits

	Policy     string             // empty: that of the Config
	Weights    map[string]float64 // of the policy's scorers; nil: its own, or those of the Config with its policy
	SessionKey string             // empty: that of the Config
}

// watchedFile is a config file and what it had when it was last looked at.
type watchedFile struct {
	File
	used []byte // the text that counts
	seen []byte // the text at the last look
	why  string // why that one is not used; empty: it is
}

// use reads the file for the first time. Its error is one of the file.
func (r *Router) use(f File) (*watchedFile, error) {
	setDefault(&f.Interval, time.Second)
	w := &watchedFile{File: f}
	text, err := f.Read(f.Path)
	if err == nil {
		err = r.apply(w, text)
	}
	if err != nil {
		return nil, fmt.Errorf("--config %s: %w", f.Path, err)
	}
	return w, nil
}

// apply takes the settings of a text, all or none.
func (r *Router) apply(w *watchedFile, text []byte) error {
	s, err := w.Decode(text)
	if err != nil {
		return err
	}
	by, key, err := r.choosing(s)
	if err != nil {
		return err
	}
	if err := r.SetInstances(s.Instances); err != nil {
		return err
	}
	if err := r.pool.use(by); err != nil { // choosing has tried it
		return err
	}
	r.session.Store(&key)
	r.SetLimits(s.Limits)
	w.used, w.seen, w.why = text, text, ""
	return nil
}

// choosing is how instances are chosen by a file's settings, or by the config where these say nothing.
func (r *Router) choosing(s *Settings) (by policy.Config, key sessionKey, err error) {
	by = policy.Config{Policy: s.Policy, Weights: s.Weights}
	if by.Policy == "" {
		by.Policy = r.config.Policy
		if by.Weights == nil {
			by.Weights = r.config.Weights
		}
	}
	made, err := policy.New(by)
	if err != nil {
		return by, key, fmt.Errorf("policy_weights: %w", err)
	}
	if len(r.config.Events) > 0 && !made.UsesPrompts() {
		return by, key, fmt.Errorf("--kv-events: policy %s does not ask what instances hold, want %s or %s", by.Policy, policy.PrefixAware, policy.PDAware)
	}
	if key, err = parseSessionKey(cmp.Or(s.SessionKey, r.config.SessionKey)); err != nil {
		err = fmt.Errorf("session_key %w", err)
	}
	return by, key, err
}

// watch looks at the file until ctx ends. It compares contents, so that neither an editor that replaces the file nor
// a link that turns to another one escapes it.
func (r *Router) watch(ctx context.Context, w *watchedFile) {
	tick := time.NewTicker(w.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.look(w)
		}
	}
}

// look reads the file and uses it if it has changed. A file that cannot be used changes nothing; it is reported once,
// after it has been the same twice, since somebody may be in the middle of writing it.
func (r *Router) look(w *watchedFile) {
	text, err := w.Read(w.Path)
	if err != nil {
		text = []byte(err.Error())
	}
	again := bytes.Equal(text, w.seen)
	w.seen = text
	switch {
	case err == nil && bytes.Equal(text, w.used):
		if w.why != "" {
			r.config.Log.Info("config file is as it was before", "file", w.Path)
		}
		w.why = ""
		meter.Mark(r.metrics.fileBad, false)
		return
	case err == nil:
		err = r.apply(w, text)
	}
	switch {
	case err == nil:
		r.metrics.fileReads.WithLabelValues("ok").Inc()
		meter.Mark(r.metrics.fileBad, false)
		r.config.Log.Info("config file has changed and is used", "file", w.Path)
	case again && err.Error() != w.why:
		w.why = err.Error()
		r.metrics.fileReads.WithLabelValues("bad").Inc()
		meter.Mark(r.metrics.fileBad, true)
		r.config.Log.Error("config file cannot be used, everything stays as it was", "file", w.Path, "err", err)
	}
}
