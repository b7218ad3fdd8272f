from .autoencoder import AutoencoderConfig as AutoencoderConfig
from .autoencoder import SparseAutoencoder as SparseAutoencoder
from .autoencoder import load_autoencoder as load_autoencoder
from .autoencoder import train_autoencoder as train_autoencoder
from .feature_hooks import read_features as read_features
from .feature_hooks import splice_hooks as splice_hooks
from .feature_study import FeatureStudy as FeatureStudy
from .feature_study import feature_study as feature_study
