"""The format: manifest, state trees and tensor files, with strict parsing of each."""
